"""Recipes whose replicas differ, or that exchange now and then."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optax
import optax.contrib

from gradcomp_jax import replicas as c
from gradcomp_jax.experiments.registered import Recipe, Transformation, after, optimizer, warm_up_stages
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.methods import block_quantized, dense, dgc
from gradcomp_jax.transforms.warm_up import Stages

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo; Douillard et al., 2023, https://arxiv.org/abs/2311.08105, section 3."""

MUON, ADAM = 0.1, 0.04
"""Learning rates inside MuLoCo, of matrices and of all else, as fractions of SGD's."""
MULOCO_RATE, MULOCO_MOMENTUM = 0.5, 0.8
"""Outside of it: steps without a length, at a constant rate, want less of an outer momentum."""


def _dense(settings: Settings) -> Transformation:
    return dense(axis_name=settings.axis_name)


def _quantized(bits: int) -> Callable[[Settings], Transformation]:
    return lambda settings: block_quantized(axis_name=settings.axis_name, bits=bits)


def _delayed(
    settings: Settings,
    warm_up: Stages,
    seed: int,
    *,
    method: Callable[[Settings], Transformation],
    compensate: bool = True,
) -> Transformation:
    delayed = c.delayed_average(method(settings), **_period(settings), delay=settings.delay, compensate=compensate)
    if not compensate:
        # Nothing is corrected meanwhile: the rate at which it is stable falls with the steps that a mean is late.
        late = settings.delay + settings.every
        settings = dataclasses.replace(settings, learning_rate=settings.learning_rate / late)
    return after(delayed, settings)


def _delayed_dgc(settings: Settings, warm_up: Stages, seed: int) -> Transformation:
    """Makes a velocity of the mean that is DGC's; between two means a replica continues with its own gradient alone.

    DGC counts exchanges, so the momentum is one that remembers as many steps, or none; a gradient comes as
    far as in every step, by the learning rate.
    """
    stages = tuple((max(1, steps // settings.every), density) for steps, density in warm_up)
    own = settings.momentum if settings.optimizer == "sgd" else 0.0
    momentum = max(0.0, 1 - (1 - own) * settings.every)
    rate = settings.learning_rate * (1 - momentum) / (1 - own)
    method = dgc(
        axis_name=settings.axis_name,
        density=settings.density,
        momentum=momentum,
        clip_norm=settings.clip_norm,
        warm_up=stages,
    )
    delayed = c.delayed_average(method, **_period(settings), delay=settings.delay)
    return after(delayed, dataclasses.replace(settings, learning_rate=rate, momentum=0.0))


def _period(settings: Settings) -> dict[str, Any]:
    return {"axis_name": settings.axis_name, "every": settings.every}


def _recipe(make: Callable[[Settings], Transformation], summary: str, *, steps: bool = True) -> Recipe:
    """Makes what goes by the settings alone: each replica's own steps, unless ``make`` has them in it, and what it makes."""
    if not steps:
        return Recipe(lambda settings, warm_up, seed: make(settings), summary)
    return Recipe(lambda settings, warm_up, seed: optax.chain(optimizer(settings), make(settings)), summary)


def _diloco(
    settings: Settings, method: Callable[[Settings], Transformation] = _dense, **streaming: Any
) -> Transformation:
    outer = c.diloco(
        method(settings), **_period(settings), learning_rate=OUTER_RATE, momentum=OUTER_MOMENTUM, **streaming
    )
    # The outer momentum lengthens what the inner steps have come: in the long run both together come as far as one. Adam's
    # steps keep their length, as in the paper.
    rate = settings.learning_rate * ((1 - OUTER_MOMENTUM) / OUTER_RATE if settings.optimizer == "sgd" else 1.0)
    return optax.chain(optimizer(dataclasses.replace(settings, learning_rate=rate)), outer)


def muon(settings: Settings) -> Transformation:
    """Makes what is inside MuLoCo. Adam has what is no matrix: vectors, and here the convolutions."""
    adam = settings.learning_rate * (ADAM if settings.optimizer == "sgd" else 1.0)
    own, others = (dataclasses.replace(settings, learning_rate=rate).rate() for rate in (adam * MUON / ADAM, adam))
    return optax.contrib.muon(own, adam_learning_rate=others)


def _muloco(settings: Settings) -> Transformation:
    """Makes MuLoCo; Thérien et al., 2025, https://arxiv.org/abs/2505.23725: Muon inside, 2 bits with error feedback outside."""
    outer = c.diloco(_quantized(2)(settings), **_period(settings), learning_rate=MULOCO_RATE, momentum=MULOCO_MOMENTUM)
    return optax.chain(muon(settings), outer)


def _streaming(settings: Settings) -> Transformation:
    """Makes streaming DiLoCo; Douillard et al., 2025, https://arxiv.org/abs/2501.18512: late, mixed, in four bits."""
    parts, delay = min(2, settings.every), min(settings.delay, settings.every - 1)
    return _diloco(settings, _quantized(4), parts=parts, delay=delay, mix=0.5)


REPLICA_RECIPES: dict[str, Recipe] = {
    name: dataclasses.replace(recipe, replicas=name != "accumulate", periodic=True)
    for name, recipe in {
        "delayed-average": Recipe(functools.partial(_delayed, method=_dense), "means arrive --delay steps later"),
        "delayed-int8": Recipe(functools.partial(_delayed, method=_quantized(8)), "the same, in block int8"),
        "delayed-dgc": Recipe(_delayed_dgc, "the same, by Deep Gradient Compression", stages=warm_up_stages),
        "stale-synchronous": Recipe(
            functools.partial(_delayed, method=_dense, compensate=False), "means of --delay steps ago, and nothing else"
        ),
        "elastic-average": _recipe(
            lambda s: c.elastic_average(_dense(s), **_period(s)),
            "replicas on elastic bands to a centre, every --every steps",
        ),
        "local-sgd": _recipe(
            lambda s: c.local_sgd(_dense(s), **_period(s)), "replicas become their mean every --every steps"
        ),
        "diloco": _recipe(_diloco, "an outer Nesterov step every --every steps", steps=False),
        "streaming-diloco": _recipe(
            _streaming, "the same in int4, two parts in turn, each --delay steps late", steps=False
        ),
        "muloco": _recipe(_muloco, "DiLoCo with Muon inside, in two bits", steps=False),
        "sparse-loco": _recipe(
            lambda s: c.sparse_loco(**_period(s)),
            "DiLoCo, sparse in two bits, with error feedback in place of momentum",
        ),
        "gossip": _recipe(
            lambda s: c.gossip(**_period(s), graph="exponential"),
            "each replica averages with one partner every --every steps",
        ),
        "accumulate": _recipe(
            lambda s: c.accumulate(after(_dense(s), s), **_period(s)),
            "one update for every --every batches",
            steps=False,
        ),
    }.items()
}
