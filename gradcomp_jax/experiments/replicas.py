"""Recipes whose replicas differ, or that exchange now and then."""

import dataclasses
import functools
from collections.abc import Callable

import optax

from gradcomp_jax import replicas as c
from gradcomp_jax.experiments.registered import Transformation, WarmUp, after
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.methods import block_quantized, dense, dgc

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo; Douillard et al., 2023, https://arxiv.org/abs/2311.08105, section 3."""


def _dense(settings: Settings) -> Transformation:
    return dense(axis_name=settings.axis_name)


def _int8(settings: Settings) -> Transformation:
    return block_quantized(axis_name=settings.axis_name)


def _delayed(
    settings: Settings,
    warm_up: WarmUp,
    seed: int,
    *,
    method: Callable[[Settings], Transformation],
    compensate: bool = True,
) -> Transformation:
    del warm_up, seed
    delayed = c.delayed_average(
        method(settings),
        axis_name=settings.axis_name,
        delay=settings.delay,
        every=settings.every,
        compensate=compensate,
    )
    if not compensate:
        # Nothing is corrected meanwhile: the rate at which it is stable falls with the steps that a mean is late.
        late = settings.delay + settings.every
        settings = dataclasses.replace(settings, learning_rate=settings.learning_rate / late)
    return after(delayed, settings)


def _delayed_dgc(settings: Settings, warm_up: WarmUp, seed: int) -> Transformation:
    """The velocity of the mean is DGC's; between two means a replica goes on with its own gradient alone."""
    del seed
    # DGC counts exchanges.
    stages = tuple((max(1, steps // settings.every), density) for steps, density in warm_up)
    method = dgc(
        axis_name=settings.axis_name,
        density=settings.density,
        momentum=settings.momentum,
        clip_norm=settings.clip_norm,
        warm_up=stages,
    )
    delayed = c.delayed_average(method, axis_name=settings.axis_name, delay=settings.delay, every=settings.every)
    return optax.chain(delayed, optax.sgd(settings.learning_rate))


def _own_steps(settings: Settings) -> Transformation:
    return optax.sgd(settings.learning_rate, momentum=settings.momentum)


def _elastic(settings: Settings, warm_up: WarmUp, seed: int) -> Transformation:
    del warm_up, seed
    band = c.elastic_average(_dense(settings), axis_name=settings.axis_name, every=settings.every)
    return optax.chain(_own_steps(settings), band)


def _local(settings: Settings, warm_up: WarmUp, seed: int) -> Transformation:
    del warm_up, seed
    mean = c.local_sgd(_dense(settings), axis_name=settings.axis_name, every=settings.every)
    return optax.chain(_own_steps(settings), mean)


def _diloco(settings: Settings, warm_up: WarmUp, seed: int) -> Transformation:
    del warm_up, seed
    outer = c.diloco(
        _dense(settings),
        axis_name=settings.axis_name,
        every=settings.every,
        learning_rate=OUTER_RATE,
        momentum=OUTER_MOMENTUM,
    )
    # The outer momentum lengthens what the inner steps have come: in the long run both together come as far as one.
    rate = settings.learning_rate * (1 - OUTER_MOMENTUM) / OUTER_RATE
    return optax.chain(_own_steps(dataclasses.replace(settings, learning_rate=rate)), outer)


def _sparse_loco(settings: Settings, warm_up: WarmUp, seed: int) -> Transformation:
    del warm_up, seed
    outer = c.sparse_loco(axis_name=settings.axis_name, every=settings.every)
    return optax.chain(_own_steps(settings), outer)


def _gossip(settings: Settings, warm_up: WarmUp, seed: int) -> Transformation:
    del warm_up, seed
    partner = c.gossip(axis_name=settings.axis_name, every=settings.every, graph="exponential")
    return optax.chain(_own_steps(settings), partner)


def _accumulate(settings: Settings, warm_up: WarmUp, seed: int) -> Transformation:
    del warm_up, seed
    return c.accumulate(after(_dense(settings), settings), axis_name=settings.axis_name, every=settings.every)


@dataclasses.dataclass(frozen=True, slots=True)
class Loose:
    """A recipe that is not synchronous.

    Attributes:
      make: ``make(settings, warm_up, seed) -> transformation``.
      summary: one line for a person.
      replicas: whether they differ.
      warms_up: whether DGC's warm-up belongs to it.
    """

    make: Callable[[Settings, WarmUp, int], Transformation]
    summary: str
    replicas: bool = True
    warms_up: bool = False


LOOSE: dict[str, Loose] = {
    "delayed-average": Loose(functools.partial(_delayed, method=_dense), "means arrive --delay steps later"),
    "delayed-int8": Loose(functools.partial(_delayed, method=_int8), "the same, in block int8"),
    "delayed-dgc": Loose(_delayed_dgc, "the same, by Deep Gradient Compression", warms_up=True),
    "stale-synchronous": Loose(
        functools.partial(_delayed, method=_dense, compensate=False), "means of --delay steps ago, and nothing else"
    ),
    "elastic-average": Loose(_elastic, "replicas on elastic bands to a centre, every --every steps"),
    "local-sgd": Loose(_local, "replicas become their mean every --every steps"),
    "diloco": Loose(_diloco, "an outer Nesterov step every --every steps"),
    "sparse-loco": Loose(_sparse_loco, "the same, sparse in two bits, with error feedback in place of momentum"),
    "gossip": Loose(_gossip, "each replica averages with one partner every --every steps"),
    "accumulate": Loose(_accumulate, "one update for every --every batches", replicas=False),
}
