"""How far the workers' selections are from a selection of their mean."""

from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.compressors import RowInfo
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.transforms.exchange import ExchangeState
from gradcomp_jax.transforms.layout_rules import LayoutRules


def selection_error(
    updates: PyTree,
    state: ExchangeState,
    rules: LayoutRules,
    *,
    rows: int,
    axis_name: AxisName | None,
    inner_axis_name: AxisName | None = None,
) -> Array:
    r"""Returns :math:`\|S(\bar x) - \overline{S(x)}\| / \|\bar g\|` of some rows of each compressed tensor, a scalar.

    x is what the workers would send from: gradient and memory. Of each tensor ``rows`` evenly spaced rows are measured;
    three times their entries cross in one all-reduce. The same on every worker; zero for zero gradients.
    """
    leaves = jax.tree.leaves(updates)
    seen: list[tuple[Any, Array]] = []
    numbers: list[Array] = []
    for (group, segments), memories in zip(rules.layout(updates).groups[:-1], state.memory[:-1], strict=True):
        for segment, memory in zip(segments, memories, strict=True):
            stride = max(1, group.rows(segment) // rows)
            every = slice(None, None, stride)
            gradient = group.join(segment, {i: leaves[i] for i in segment.leaves})
            kept = jax.tree.map(lambda p: p.value, memory, is_leaf=is_per_device)
            target, _ = group.memory.compensate(gradient, kept)
            target, gradient = (group.encoded_rows(segment, a)[every][:rows] for a in (target, gradient))
            count = group.counts(segment)[every][:rows]
            numbers += [target, _round_trip(group.compressor, target, count), gradient]
            seen.append((group.compressor, count))
    means = iter(co.psum(numbers, axis_name))
    distance, length = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for code, count in seen:
        target, sent, gradient = (next(means) for _ in range(3))
        # Sums in place of means throughout: a selection does not ask for the scale, and the ratio does not either.
        distance += jnp.sum(jnp.square(_round_trip(code, target, count) - sent))
        length += jnp.sum(jnp.square(gradient))
    distance, length = co.psum([distance, length], inner_axis_name)
    return jnp.sqrt(distance / jnp.where(length > 0, length, 1.0))


def _round_trip(code: Any, rows: Array, count: Array) -> Array:
    info = RowInfo(count, jax.random.key(0))
    return code.decode(code.encode(rows, code.init(rows.shape), info)[0], info)
