"""What both sides must know beyond the payload, agreed on before anything is encoded."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from gradcomp_jax import collectives as co
from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.transforms.layout import Group, Segment
from gradcomp_jax.transforms.step_keys import StepKeys


def side_information(
    groups: Sequence[tuple[Group, Sequence[Segment]]], statistics: list[list[Any]], keys: StepKeys, workers: co.Workers
) -> list[list[Array | None]]:
    """Returns what all workers know of each segment: the maximum or the mean of their statistics, or seeds.

    Statistics of one kind cross in one all-reduce; seeds do not cross.
    """

    def of_kind(kind: str) -> list[Array]:
        agreeing = [statistics[g] for g, (group, _) in enumerate(groups) if group.compressor.side_information == kind]
        return [a for of_group in agreeing for a in of_group]

    largest = iter(co.pmax(of_kind("max"), workers.axis_name))
    total = iter(co.psum(of_kind("mean"), workers.axis_name))
    result: list[list[Array | None]] = []
    for group, segments in groups:
        kind = group.compressor.side_information
        if kind is None:
            result.append([None for _ in segments])
        elif kind == "max":
            result.append([next(largest) for _ in segments])
        elif kind == "mean":
            # All tensors of a compressor go together: what follows (an orthogonalization) is slow on small arrays.
            mean = group.compressor.from_mean(jnp.concatenate([next(total) for _ in segments]) / workers.count)
            ends = [sum(group.rows(s) for s in segments[: j + 1]) for j in range(len(segments))]
            result.append([mean[end - group.rows(s) : end] for end, s in zip(ends, segments, strict=True)])
        else:
            of_leaf = keys.of_leaves(keys.common, [s.leaves[0] for s in segments])
            result.append([kernels.row_seeds(k, group.rows(s)) for k, s in zip(of_leaf, segments, strict=True)])
    return result
