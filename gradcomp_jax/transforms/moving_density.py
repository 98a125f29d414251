"""A density that follows a schedule or a target error, among a few densities that are compiled into one program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks
from gradcomp_jax import memory as mem
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import Collective, ReduceScatter, psum
from gradcomp_jax.compressors import Compressor, RowInfo, dense, topk
from gradcomp_jax.compressors.topk import block_for
from gradcomp_jax.core.context import context_of
from gradcomp_jax.core.exchange import ExchangeState, exchange
from gradcomp_jax.core.layout_rules import LayoutRules, layout_rules
from gradcomp_jax.core.masks import Mask, gains
from gradcomp_jax.core.passes import places, taken
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device


class DensityState(NamedTuple):
    """Holds the state of :func:`density_schedule` and :func:`density_controller`.

    Attributes:
        level: int32 scalar, the number of the next step's density, counted from the lowest.
        error: float32 scalar, the selection error when it was last measured; NaN before that and under a schedule.
        exchange: the exchange's state, which is the same for all densities.
    """

    level: Array
    error: Array
    exchange: ExchangeState


@_arguments.checked
def density_schedule(
    densities: Sequence[float],
    schedule: Callable[[Array], Array],
    *,
    axis_name: AxisName | None,
    memory: mem.Memory | None = None,
    collective: Collective | str = "auto",
    mask: Mask | None = None,
    make: Callable[..., Compressor] = topk,
) -> optax.GradientTransformationExtraArgs:
    """Makes an exchange of selections whose density follows an optax schedule.

    Shapes are static, so a few densities are compiled, as branches of one program on the replicated step count. Each step
    takes the lowest density that is at least the schedule's value, or else the highest density.

    Example:
        >>> schedule = optax.exponential_decay(0.1, transition_steps=1000, decay_rate=0.5)
        >>> tx = optax.chain(gc.density_schedule((0.01, 0.1), schedule, axis_name="data"), optax.sgd(0.1))
        >>> int(gc.diagnostics(gc.init_state(params, tx, mesh))["density/level"])
        1

    Args:
        densities: at least one, each in (0, 1].
        schedule: ``schedule(step) -> density``, such as ``optax.exponential_decay``.
        axis_name: the axis to average over, or ``None`` for one worker.
        memory: what stays behind; ``residual()`` by default.
        collective: see :func:`gradcomp_jax.exchange`.
        mask: which leaves to compress; by default those with two or more dimensions that are smaller at the lowest density.
        make: ``make(density, block=...) -> compressor``.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for a density outside (0, 1], for none, and for a compressor that does not select by size.
    """
    levels = _Levels(densities, axis_name, make, mask, memory=memory, collective=collective)

    def update(updates: PyTree, state: DensityState, params: PyTree | None = None, **extra: Any) -> Any:
        wanted = jnp.asarray(schedule(state.exchange.step), jnp.float32)
        # A rounding error above a density must not take the next one.
        below = jnp.asarray(levels.densities[:-1], jnp.float32) < wanted * jnp.float32(1 - 1e-6)
        level = jnp.sum(below, dtype=jnp.int32)
        updates, inner = levels.step(level, updates, state.exchange, params, **extra)
        return updates, DensityState(level, state.error, inner)

    return optax.GradientTransformationExtraArgs(levels.init, update)


@_arguments.checked
def density_controller(
    densities: Sequence[float],
    target_error: float,
    *,
    axis_name: AxisName | None,
    every: int = 50,
    rows: int = 4,
    memory: mem.Memory | None = None,
    collective: Collective | str = "auto",
    mask: Mask | None = None,
    make: Callable[..., Compressor] = topk,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes an exchange of selections that takes the lowest density whose selection error stays below a target.

    The error is :math:`\xi = \|S(\bar x) - \overline{S(x)}\| / \|\bar g\|`: how far the mean of the workers' selections
    is from the selection of their mean, the number that the convergence proof of top-k SGD bounds. It is measured every
    ``every`` steps at the density in use, on a few blocks of every tensor, which cross whole for that. Above the target the
    next step takes the next higher density, below half of the target the next lower one. The first density is the highest.

    Example:
        >>> exchange = gc.density_controller((0.001, 0.01), target_error=0.5, axis_name="data")
        >>> tx = optax.chain(exchange, optax.sgd(0.1))
        >>> int(gc.diagnostics(gc.init_state(params, tx, mesh))["density/level"])
        1

    Args:
        densities: at least one, each in (0, 1].
        target_error: target of :math:`\xi`; 0.1 to 1 is usual.
        axis_name: the axis to average over, or ``None`` for one worker.
        every: steps from one measurement to the next.
        rows: blocks of each tensor that are measured, evenly spread.
        memory: what stays behind; ``residual()`` by default.
        collective: see :func:`gradcomp_jax.exchange`.
        mask: as for :func:`density_schedule`.
        make: ``make(density, block=...) -> compressor``.

    Returns:
        A transformation of per-device gradients. Its update is their compressed mean, in their shapes and dtypes, equal on
        every worker.

    Raises:
        ValueError: for a density outside (0, 1], none, a target that is not positive, and for a compressor that does not
            select by size.

    References:
        Alistarh et al., 2018, https://arxiv.org/abs/1809.10505, assumption 1.
    """
    if not (isinstance(target_error, (int, float)) and target_error > 0):
        raise ValueError(f"target_error must be a positive Python number, got {target_error}")
    period, sample = _checks.positive_int("every", every), _checks.positive_int("rows", rows)
    levels = _Levels(densities, axis_name, make, mask, memory=memory, collective=collective)

    def update(updates: PyTree, state: DensityState, params: PyTree | None = None, **extra: Any) -> Any:
        axes = {"axis_name": axis_name, "inner_axis_name": context_of(extra).inner_axis_name}

        def measure(level: Array, updates: PyTree, state: ExchangeState) -> Array:
            branches = [
                lambda u, s, rules=rules: selection_error(u, s, rules, rows=sample, **axes) for rules in levels.rules
            ]
            return jax.lax.switch(level, branches, updates, state)

        due = state.exchange.step % period == 0
        error = jax.lax.cond(due, measure, lambda *_: state.error, state.level, updates, state.exchange)
        moved = state.level + jnp.where(error > target_error, 1, jnp.where(error < target_error / 2, -1, 0))
        # The error of a gradient that is not finite is a NaN; comparisons with it are false.
        level = jnp.where(due, jnp.clip(moved, 0, len(levels.densities) - 1), state.level).astype(jnp.int32)
        updates, inner = levels.step(state.level, updates, state.exchange, params, **extra)
        return updates, DensityState(level, error, inner)

    return optax.GradientTransformationExtraArgs(levels.init, update)


class _Levels:
    """Holds exchanges of several densities, which share one state."""

    def __init__(
        self, densities: Sequence[float], axis_name: AxisName | None, make: Any, mask: Mask | None, **options: Any
    ) -> None:
        if not densities:
            raise ValueError("densities must not be empty: name at least one, such as (0.001, 0.01)")
        self.densities = sorted(_checks.in_unit_interval("density", d) for d in densities)
        block = block_for(self.densities[0])
        codes = [make(density, block=block) for density in self.densities]
        for code in codes:
            if not code.is_sparsifier or code.side_information:
                raise ValueError(
                    f"a density that moves is one of selections by size, and {type(code).__name__} is none; use"
                    " make=gradcomp_jax.compressors.topk"
                )
        if isinstance(options["collective"], ReduceScatter):
            raise ValueError(
                "a density that moves is for updates that all workers have whole; use collective='two_phase'"
            )
        options["mask"] = gains(codes[0], dense()) if mask is None else mask
        self.rules = [layout_rules(code, **options) for code in codes]
        self._exchanges = [exchange(code, axis_name=axis_name, **options) for code in codes]

    def init(self, params: PyTree) -> DensityState:
        top = jnp.full((), len(self.densities) - 1, jnp.int32)
        return DensityState(top, jnp.full((), jnp.nan, jnp.float32), self._exchanges[0].init(params))

    def step(self, level: Array, updates: PyTree, state: ExchangeState, params: PyTree | None, **extra: Any) -> Any:
        # The gradient is closed over, so that an exchange sees where it comes from.
        branches = [lambda s, tx=tx: tx.update(updates, s, params, **extra) for tx in self._exchanges]
        return jax.lax.switch(level, branches, state)


def selection_error(
    updates: PyTree,
    state: ExchangeState,
    rules: LayoutRules,
    *,
    rows: int,
    axis_name: AxisName | None,
    inner_axis_name: AxisName | None = None,
) -> Array:
    r"""Returns :math:`\|S(\bar x) - \overline{S(x)}\| / \|\bar g\|` over some rows of every compressed tensor: float32 scalar.

    x is the target that a worker selects from: gradient and memory. ``rows`` rows of each tensor, evenly spread, are measured;
    three times their entries cross in one all-reduce. The result is the same on every worker; it is NaN for zero gradients,
    which give nothing to compare with.
    """
    leaves = jax.tree.leaves(updates)
    seen: list[tuple[Any, Array]] = []
    numbers: list[Array] = []
    for (group, segments), memories in zip(rules.layout(updates).groups[:-1], state.memory[:-1], strict=True):
        for segment, memory in zip(segments, memories, strict=True):
            gradient = group.join(segment, {i: leaves[i] for i in segment.leaves})
            kept = narrow.opened(jax.tree.map(lambda p: p.value, memory, is_leaf=is_per_device))
            target, _ = group.memory.compensate(gradient, kept)
            target, gradient = (group.encoded_rows(segment, a) for a in (target, gradient))
            where = [places(target.shape, max(1, segment.rows // rows))]
            target, gradient, count = (taken(a, where)[:rows] for a in (target, gradient, group.counts(segment)))
            numbers += [target, _round_trip(group.compressor, target, count), gradient]
            seen.append((group.compressor, count))
    means = iter(psum(numbers, axis_name))
    distance, length = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for code, count in seen:
        target, sent, gradient = (next(means) for _ in range(3))
        # Sums instead of means throughout: neither a selection nor the ratio depends on the scale.
        distance += jnp.sum(jnp.square(_round_trip(code, target, count) - sent))
        length += jnp.sum(jnp.square(gradient))
    distance, length = psum([distance, length], inner_axis_name)
    return jnp.where(length > 0, jnp.sqrt(distance / jnp.where(length > 0, length, 1.0)), jnp.nan)


def _round_trip(code: Any, rows: Array, count: Array) -> Array:
    info = RowInfo(count, jax.random.key(0))
    return code.decode(code.encode(rows, code.init(rows.shape), info)[0], info)
