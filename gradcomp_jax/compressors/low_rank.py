"""PowerSGD's code and Dion's: one step of a power iteration, started where the last one ended."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import LARGEST, Compressor, RowInfo


class LowRankPayload(NamedTuple):
    """Holds ``right``, float32 ``[matrices, columns, rank]``, Q of each matrix."""

    right: Array


@dataclasses.dataclass(frozen=True)
class LowRank(Compressor):
    """Implements :func:`low_rank`. A row is one whole matrix, so that matrices of one shape are encoded together."""

    rank: int
    shape: tuple[int, int]
    seed: int
    side_information = "mean"  # of P
    summable = True  # Q is linear in the matrix once all workers have the same P

    @property
    def row_shape(self) -> tuple[int, int]:
        """Returns the sides of the matrix."""
        return self.shape

    def init(self, shape: tuple[int, ...]) -> Array:
        """Returns Q of the first step for every matrix of the tensor, from the seed: the same on every worker."""
        matrices = kernels.row_count(math.prod(shape), self.block)
        return jax.random.normal(jax.random.key(self.seed), (matrices, self.shape[1], self.rank), jnp.float32)

    def _matrices(self, rows: Array) -> Array:
        return rows.reshape(-1, *self.shape)

    def statistic(self, rows: Array, info: RowInfo, state: PyTree = ()) -> Array:
        """Returns P = M Q: float32 ``[matrices, shape[0], rank]``."""
        return kernels.times(self._matrices(rows), state)

    def from_mean(self, mean: Array) -> Array:
        """Returns orthonormal columns, for all matrices of one shape together."""
        return kernels.orthogonalize(mean)

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[LowRankPayload, PyTree]:
        """Computes :math:`Q = M^T P`."""
        # Full precision: matrix units would multiply in bfloat16 by default, and the residual would see it.
        right = jnp.einsum("bij,bir->bjr", self._matrices(rows), info.need("side"), precision=lax.Precision.HIGHEST)
        return LowRankPayload(right), state

    def finite(self, payload: LowRankPayload, statistic: Any, largest: float = LARGEST) -> Array:
        """Checks entries against the limit divided by the matrix: products add up its entries, and an entry shows in part.

        An entry that the factors do not show, in a row and a column that are zero otherwise, stays in the memory, finite.
        """
        return super().finite(payload, statistic, largest / self.block)

    def decode(self, payload: LowRankPayload, info: RowInfo = RowInfo()) -> Array:
        """Multiplies the factors, :math:`P Q^T`."""
        return kernels.outer(info.need("side"), payload.right).reshape(-1, self.block)

    def next_state(self, state: Array, mean: LowRankPayload) -> Array:
        """Returns the warm start: Q of this step, except columns that are zero, which keep the previous direction.

        A column of zeros would stay zero forever. Only the columns' span matters, so they are kept at a length where
        nothing underflows.
        """
        largest = jnp.max(jnp.abs(mean.right), axis=1, keepdims=True)
        usable = largest > jnp.finfo(jnp.float32).tiny
        return jnp.where(usable, mean.right / jnp.where(usable, largest, 1.0), state)


@_arguments.checked
def low_rank(rank: int, shape: tuple[int, int], *, seed: int = 0) -> LowRank:
    r"""Sends a matrix as :math:`P Q^T` of the given rank: rank (rows + columns) float32 values for rows x columns.

    :math:`P = \mathrm{orth}(\frac1N \sum_i M_i Q_{t-1})`, :math:`Q_t = \frac1N \sum_i M_i^T P`, and the mean of the matrices is
    approximated by :math:`P Q_t^T`. Both sums are plain all-reduces for every N. :math:`Q` is the warm start of the next step
    and the only state; it is equal on every worker. A tensor of several matrices, in sequence, has a P and a Q for each.

    Args:
        rank: r, at least 1.
        shape: rows and columns of the matrix.
        seed: seed of the first Q.

    Raises:
        ValueError: for a rank below 1 or above the smaller side, and for an empty matrix.

    References:
        Vogels et al., 2019, PowerSGD, https://arxiv.org/abs/1905.13727, algorithm 1.
    """
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ValueError(f"shape must be rows and columns, such as (64, 32), got {shape!r}")
    sides = (_checks.positive_int("shape[0]", shape[0]), _checks.positive_int("shape[1]", shape[1]))
    rank = _checks.positive_int("rank", rank)
    if rank > min(sides):
        raise ValueError(f"rank must be at most {min(sides)} for a matrix of {sides[0]} x {sides[1]}, got {rank}")
    return LowRank(sides[0] * sides[1], rank, sides, seed)


def highest_rank(shape: tuple[int, int]) -> int:
    """Returns the highest rank at which a matrix's factors have fewer entries than the matrix, or 1 if there is none."""
    rows, columns = shape
    return max(1, (rows * columns - 1) // (rows + columns))


@dataclasses.dataclass(frozen=True)
class LowRankDirection(LowRank):
    """Implements :func:`low_rank_direction`."""

    momentum: float

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[LowRankPayload, PyTree]:
        r"""Computes :math:`(1 - \mu) R`, which leaves the memory."""
        payload, state = super().encode(rows, state, info)
        return LowRankPayload((1 - self.momentum) * payload.right), state

    def of_sum(self, total: LowRankPayload, workers: int) -> LowRankPayload:
        """Returns the columns at length 1, times a factor from the sides of the matrix; a common factor of all drops out."""
        rows, columns = self.shape
        return LowRankPayload(kernels.unit_columns(total.right) * (workers * math.sqrt(columns / rows)))


def low_rank_direction(rank: int, shape: tuple[int, int], *, momentum: float = 0.95, seed: int = 0) -> LowRankDirection:
    r"""Sends a momentum at low rank, and makes the update from its direction: Dion's code, for a memory without decay.

    P and :math:`R = M^T P` are computed like P and Q of :func:`low_rank`. :math:`(1 - \mu) P R^T` of a worker's matrix counts
    as sent, and what stays in the memory is its momentum. The update is not the mean of what was sent but
    :math:`\sqrt{columns / rows} \, P Q^T`, where Q is the workers' mean R with columns of length 1: its singular values are
    about 1, independent of the gradient's length. Columns of zeros stay zero.

    Args:
        rank: r, at least 1.
        shape: rows and columns of the matrix; for a dense layer, inputs and outputs.
        momentum: :math:`\mu`, in [0, 1).
        seed: seed of the first Q.

    Raises:
        ValueError: for a rank below 1 or above the smaller side, an empty matrix, and a momentum outside [0, 1).
        TypeError: for a momentum that is traced.

    References:
        Ahn et al., 2025, Dion, https://arxiv.org/abs/2504.05295, algorithm 1.
    """
    factor = _checks.below_one("momentum", _checks.static_number("momentum", momentum))
    plain = low_rank(rank, shape, seed=seed)
    return LowRankDirection(plain.block, rank, plain.shape, seed, factor)
