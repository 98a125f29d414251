"""What a recipe is, and every registered method as one: its own defaults, the shared hyper-parameters where it takes them."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.methods import adamw
from gradcomp_jax.methods.registry import METHODS, Method
from gradcomp_jax.transforms.warm_up import DGC_DENSITIES, Stages

Transformation: TypeAlias = optax.GradientTransformationExtraArgs

NO_LENGTH = 0.02
"""Learning rate of updates that have no length (signs, Adam's direction), as a fraction of SGD's; no momentum follows them."""

RATES: dict[str, float] = {"sign_sgd": 0.01, "demo": 0.04, "random_k": 0.2, "ef21": 0.2, "dion": 0.2}
"""Learning rates, as a fraction of SGD's, of methods that do not train at it: signs, each at its own; random-k, where an entry
waits 1 / density steps however large it is; EF21, where the whole gradient is an estimate that is as old; Dion's
directions, whose entries are smaller than signs."""

DENSE_FRACTION = 0.15
"""Share of a run in which a method warms up dense; Tang et al., 2021, https://arxiv.org/abs/2102.02888, section 7.1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """A method with its place in an optimizer.

    Attributes:
      make: ``make(settings, stages, seed) -> transformation``.
      summary: one line for a person.
      stages: ``stages(settings, steps_per_epoch)``: the ``(steps, density)`` before the final density; none by default.
      replicas: whether every worker has parameters of its own.
      periodic: whether it exchanges once in ``settings.every`` steps.
    """

    make: Callable[[Settings, Stages, int], optax.GradientTransformationExtraArgs]
    summary: str
    stages: Callable[[Settings, int], Stages] | None = None
    replicas: bool = False
    periodic: bool = False

    def warm_up(self, settings: Settings, steps_per_epoch: int) -> Stages:
        """Returns the ``(steps, density)`` stages before the final density; empty if none."""
        return self.stages(settings, steps_per_epoch) if self.stages else ()


def warm_up_stages(settings: Settings, steps_per_epoch: int) -> Stages:
    """Cuts the warm-up epochs into equal stages of falling density.

    Densities at or below the final one are left out, so a dense enough run has no warm-up.
    """
    densities = [density for density in DGC_DENSITIES if density > settings.density]
    steps = round(settings.warm_up_epochs * steps_per_epoch)
    if not densities or not steps:
        return ()
    edges = [round(steps * i / len(densities)) for i in range(len(densities) + 1)]
    lengths = [after - before for before, after in itertools.pairwise(edges)]
    return tuple((n, density) for n, density in zip(lengths, densities, strict=True) if n)


def make_registered(settings: Settings, warm_up: Stages, seed: int, *, name: str, **given: Any) -> Transformation:
    """Returns the transformation of a registered method, with its learning rate and its momentum in their places.

    ``given`` are options of the method.
    """
    method = METHODS[name]
    takes = inspect.signature(method.make).parameters
    options: dict[str, Any] = {**method.options, **given}
    if "density" in takes:
        options["density"] = settings.density
    if "warm_up_steps" in takes:
        options["warm_up_steps"] = max(1, sum(steps for steps, _ in warm_up))

    def make(**key: Any) -> Transformation:
        return method.make(axis_name=settings.axis_name, **options, **key)

    exchange = seeded(make, seed) if "key" in takes else make()
    usual = 1.0 if method.update == "mean" else NO_LENGTH
    rate = settings.learning_rate * RATES.get(name, usual)
    if settings.optimizer == "adamw":
        # Adam's own update has no length either.
        rate = settings.learning_rate if method.update == "mean" else rate / NO_LENGTH
    if method.update == "mean" and method.momentum == "after":
        return after(exchange, dataclasses.replace(settings, learning_rate=rate))
    return optax.chain(exchange, optax.sgd(dataclasses.replace(settings, learning_rate=rate).rate()))


def dense_stage(settings: Settings, steps_per_epoch: int, *, name: str) -> Stages:
    """Returns the dense steps before the method's own, as a stage of density 1; none for most methods."""
    if "warm_up_steps" not in inspect.signature(METHODS[name].make).parameters:
        return ()
    return ((max(1, round(DENSE_FRACTION * settings.epochs * steps_per_epoch)), 1.0),)


def summary(method: Method) -> str:
    """Returns the first sentence of a method's documentation."""
    return (inspect.getdoc(method.make) or "").partition("\n")[0].rstrip(".")


def after(exchange: Transformation, settings: Settings) -> Transformation:
    """Returns the exchange, then the optimizer on the averaged gradient, AdamW with its first moment where that wants it."""
    if settings.optimizer == "adamw":
        return adamw(settings.rate(), exchange)
    return optax.chain(exchange, optimizer(settings))


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """Returns SGD with momentum, or AdamW with its own, of gradients that no exchange has been through."""
    if settings.optimizer == "adamw":
        return optax.adamw(settings.rate())
    # A momentum of 0 would keep a trace for nothing.
    return optax.sgd(settings.rate(), momentum=settings.momentum or None)


class _SeededState(NamedTuple):
    key: jax.Array
    inner: Any


def seeded(make: Callable[..., Transformation], seed: int) -> Transformation:
    """Returns a transformation whose key lies in its state and not in the compiled program."""
    make(key=seed)  # What it refuses, it refuses now.

    def init(params: Any) -> _SeededState:
        key = jax.random.key(seed)
        return _SeededState(jax.random.key_data(key), make(key=key).init(params))

    def update(updates: Any, state: _SeededState, params: Any = None, **extra: Any) -> tuple[Any, _SeededState]:
        key = jax.random.wrap_key_data(state.key)
        updates, inner = make(key=key).update(updates, state.inner, params, **extra)
        return updates, _SeededState(state.key, inner)

    return optax.GradientTransformationExtraArgs(init, update)
