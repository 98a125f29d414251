"""What a recipe is, and DGC's warm-up."""

import dataclasses
import itertools
from collections.abc import Callable

import optax

from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.transforms.warm_up import DGC_DENSITIES, Stages


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
