"""A density that falls in stages, within one compiled program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._typing import Array, PyTree

Stages = tuple[tuple[int, float], ...]
"""``((steps, density), ...)``: each density holds for that many steps; the final density follows."""

DGC_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)


@_arguments.checked
def warm_up(steps_per_stage: int, densities: Sequence[float] = DGC_DENSITIES) -> Stages:
    """Returns the same number of steps at each of the densities, by default Deep Gradient Compression's.

    The paper's sparsities are 75%, 93.75%, 98.4375%, 99.6% and then the final one, an epoch each.

    Example:
        >>> gc.warm_up(500)
        ((500, 0.25), (500, 0.0625), (500, 0.015625), (500, 0.004))
        >>> tx = optax.chain(gc.dgc(axis_name="data", warm_up=gc.warm_up(500)), optax.sgd(0.1))

    Args:
        steps_per_stage: usually the steps of an epoch.
        densities: falling, each in (0, 1].

    Raises:
        ValueError: for fewer than one step or a density outside (0, 1].

    References:
        Lin et al., 2018, https://arxiv.org/abs/1712.01887, section 3.3.
    """
    steps = _checks.positive_int("steps_per_stage", steps_per_stage)
    return tuple((steps, _checks.in_unit_interval("density", d)) for d in densities)


def _pairs(stages: Any) -> Stages:
    """Refuses what is not a sequence of pairs, such as one number of steps or a single stage."""
    try:
        return tuple((steps, density) for steps, density in stages)
    except (TypeError, ValueError):
        raise TypeError(
            "warm_up must be stages ((steps, density), ...), such as gradcomp_jax.warm_up(100), 100 steps at each of four"
            f" densities, or ((100, 0.1),), got {stages!r}"
        ) from None


def staged(
    make: Callable[[float], optax.GradientTransformationExtraArgs],
    stages: Stages,
    final: float,
    *,
    step_of: Callable[[Any], Array],
) -> optax.GradientTransformationExtraArgs:
    """Returns one transformation that behaves as ``make(density)`` of the present stage.

    All stages are compiled into one program, as branches on the replicated step count. So nothing is recompiled when
    the density changes, and all workers take the same branch.

    Args:
        make: builds the transformation for a density; its state must not depend on it.
        stages: ``((steps, density), ...)``.
        final: the density after the last stage.
        step_of: reads the step count (int32 scalar, replicated) from the state.

    Raises:
        ValueError: for a stage of less than one step or a density outside (0, 1].
    """
    ends, total, made = [], 0, []
    for steps, density in _pairs(stages):
        total += _checks.positive_int("steps of a warm-up stage", steps)
        ends.append(total)
        made.append(make(_checks.in_unit_interval("density", density)))
    made.append(make(final))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> Any:
        stage = jnp.sum(step_of(state) >= jnp.asarray(ends, jnp.int32), dtype=jnp.int32)
        # The gradient is closed over, so that an exchange sees where it comes from.
        branches = [lambda s, tx=tx: tx.update(updates, s, params, **extra) for tx in made]
        return jax.lax.switch(stage, branches, state)

    return made[-1] if not stages else optax.GradientTransformationExtraArgs(made[-1].init, update)
