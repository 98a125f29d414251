"""Some entries of each block, chosen by seeds that all workers know: no index crosses the wire."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, _registered, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo
from gradcomp_jax.compressors.dense import dense
from gradcomp_jax.compressors.topk import block_for


@_registered.node
@dataclasses.dataclass(frozen=True)
class RandomKPayload:
    """Holds ``value``, float32 or bfloat16 ``[rows, k]``, in the order of the positions that the seeds give."""

    value: Array


@dataclasses.dataclass(frozen=True)
class RandomK(Compressor):
    """Implements :func:`random_k`."""

    k: int
    rescale: bool
    dtype: Any
    side_information = "seeds"  # of the positions
    measures_largest = True  # an entry that is not finite shows there even if it is not chosen
    is_sparsifier = True

    @property
    def summable(self) -> bool:  # type: ignore[override]
        """Returns whether values are float32: then they add without loss, at the same positions on all workers."""
        return self.dtype == jnp.float32

    @property
    def unbiased(self) -> bool:
        """Returns whether values are rescaled."""
        return self.rescale

    def _index(self, info: RowInfo) -> Array:
        return kernels.random_of_rows(info.need("side"), self.block, self.k)

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[RandomKPayload, PyTree]:
        """Takes the entries at the positions that the seeds give."""
        value = kernels.take_from_rows(rows, self._index(info))
        return RandomKPayload((value * self._factor).astype(self.dtype)), state

    @property
    def _factor(self) -> float:
        return self.block / self.k if self.rescale else 1.0

    def decode(self, payload: RandomKPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns the values at their positions, zeros elsewhere."""
        return kernels.place_in_rows(self._index(info), payload.value.astype(jnp.float32), self.block)

    def sent_mask(self, payload: RandomKPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns the chosen entries, unless they are zero."""
        index = jnp.where(payload.value != 0, self._index(info), -1)
        return kernels.mark_in_rows(index, self.block)

    def reduce(self, payloads: RandomKPayload, info: RowInfo = RowInfo()) -> Array:
        """Adds the values, then places them once."""
        total = kernels.sum_of_workers(payloads.value)
        return self.decode(RandomKPayload(total), info)

    def downlink(self, workers: int) -> "RandomK":
        """Returns a code of the same positions, which hold all entries of the mean; the rescaling is already in them."""
        return dataclasses.replace(self, rescale=False)

    def exact_downlink(self, workers: int) -> bool:
        """Returns whether values cross as float32: then the same positions hold the whole mean."""
        return self.dtype == jnp.float32

    def rounding(self, rows: Array, payload: RandomKPayload, info: RowInfo = RowInfo()) -> RandomKPayload:
        """Returns the rounding errors of the chosen values in the narrower dtype, in float32."""
        exact = kernels.take_from_rows(rows, self._index(info))
        return RandomKPayload(exact - payload.value.astype(jnp.float32))


@_arguments.checked
def random_k(
    density: float = 0.01, *, block: int | None = None, rescale: bool = False, dtype: Any = jnp.bfloat16
) -> RandomK:
    r"""Sends ``max(1, round(density * block))`` entries of every block at random, the same ones on every worker.

    Every row has a seed that follows from the step, so positions are not sent: it sends at most half of what top-k sends for
    as many entries. Each of k bins of a row gives one entry; every entry is chosen with probability :math:`k / block`.

    Args:
        density: fraction of the entries to send, in (0, 1].
        block: entries of a row; by default as for :func:`~gradcomp_jax.compressors.topk`.
        rescale: multiplies by :math:`block / k`, which makes the code unbiased, for use without a residual.
        dtype: dtype of the values on the wire, float32 or bfloat16.

    Raises:
        ValueError: for a density outside (0, 1] or an unknown dtype.
        TypeError: for a traced density.

    References:
        Stich et al., 2018, Sparsified SGD with Memory, https://arxiv.org/abs/1809.07599, section 2.
    """
    _checks.in_unit_interval("density", density)
    size = block_for(density) if block is None else _checks.positive_int("block", block)
    return RandomK(size, max(1, round(density * size)), rescale, dense(dtype).dtype)
