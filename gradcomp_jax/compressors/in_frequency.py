"""A selection of frequencies: another compressor over the cosine transform of each block."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _arguments, _checks, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import LARGEST, Compressor, RowInfo, add_up
from gradcomp_jax.compressors.topk import TopKPayload
from gradcomp_jax.compressors.union import Union

_AT_ONCE = 1024
"""Up to this many entries of a row, counted over all workers, are added in one expression on accelerators."""

Average = Literal["workers", "senders"]


@dataclasses.dataclass(frozen=True)
class InFrequency(Compressor):
    """Implements :func:`in_frequency`."""

    inner: Compressor
    average: Average = "workers"
    pads_nonzero = True  # a frequency reaches into the padding

    def statistic(self, rows: Array, info: RowInfo, state: PyTree = ()) -> Array | None:
        """Returns the largest entry of each row, where the inner code needs a statistic to check that all are finite."""
        asked = jax.eval_shape(lambda r: self.inner.statistic(r, RowInfo(jnp.zeros(r.shape[:1], jnp.int32))), rows)
        return None if asked is None else kernels.largest_of_rows(rows)

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[Any, PyTree]:
        """Transforms every block and encodes its frequencies, as many as the block has entries, padding included."""
        every = jnp.full(rows.shape[:1], self.block, jnp.int32)
        return self.inner.encode(kernels.dct(rows), state, info._replace(count=every, statistic=None))

    def finite(self, payload: Any, statistic: Any, largest: float = LARGEST) -> Array:
        """Asks the inner code, with the limit divided by the block: all of a block's entries may add up in one frequency."""
        return self.inner.finite(payload, statistic, largest / self.block)

    def decode(self, payload: Any, info: RowInfo = RowInfo()) -> Array:
        """Decodes, then transforms back. Accelerators do so without a dense row for a few frequencies."""

        def dense(payload: Any) -> Array:
            return kernels.inverse_dct(self.inner.decode(payload, info))

        def few(payload: Any) -> Array:
            return kernels.inverse_dct_of_few(payload.index, payload.numbers(), self.block)

        if not (isinstance(payload, TopKPayload) and kernels.are_few(payload.index.shape[-1], self.block)):
            return dense(payload)
        return kernels.on_cpu(dense, few, payload)

    def reduce(self, payloads: Any, info: RowInfo = RowInfo()) -> Array:
        """Adds frequencies, and transforms back once. With ``senders`` each sum is first times N over the number of senders."""
        if self.average == "senders" or not isinstance(payloads, TopKPayload):
            return kernels.inverse_dct(self._total(payloads, info))

        def of_all(payloads: TopKPayload) -> tuple[Array, Array]:
            values = jax.vmap(TopKPayload.numbers)(payloads)
            return jnp.concatenate(list(payloads.index), axis=-1), jnp.concatenate(list(values), axis=-1)

        def placed_at_once(payloads: TopKPayload) -> Array:
            return kernels.inverse_dct(kernels.place_repeated(*of_all(payloads), self.block))

        def as_products(payloads: TopKPayload) -> Array:
            return kernels.inverse_dct_of_few(*of_all(payloads), self.block)

        def by_frequency(payloads: TopKPayload) -> Array:
            return kernels.inverse_dct(self._total(payloads, info))

        if payloads.index.shape[0] * payloads.index.shape[-1] > _AT_ONCE:
            return by_frequency(payloads)
        # TPU scatters slowly, and computes both factors of a product in the kernel that multiplies them.
        return lax.platform_dependent(payloads, cpu=by_frequency, tpu=as_products, default=placed_at_once)

    def _total(self, payloads: Any, info: RowInfo) -> Array:
        """Returns the sum of all workers' frequencies."""
        total = self.inner.reduce(payloads, info)
        if self.average == "senders":
            workers = jax.tree.leaves(payloads)[0].shape[0]
            many = add_up(lambda one, _: self.inner.sent_mask(one, info).astype(jnp.float32), payloads)
            total = total * (workers / jnp.maximum(many, 1.0))
        return total

    def downlink(self, workers: int) -> Compressor:
        """Returns the inner compressor's downlink, over frequencies again.

        Raises:
            ValueError: for an average over senders, which needs gathered payloads.
        """
        if self.average == "senders":
            raise ValueError("in_frequency(average='senders') counts who sent what: use collective='all_gather'")
        return dataclasses.replace(self, inner=self.inner.downlink(workers))


@_arguments.checked
def in_frequency(inner: Compressor, *, average: Average = "workers") -> InFrequency:
    """Encodes the orthonormal cosine transform (DCT-II) of every block, and decodes to entries.

    A block of more than 128 entries is treated as a two-dimensional chunk, as nearly square as possible.

    Args:
        inner: encodes the frequencies, such as ``topk``; needs no side information.
        average: ``workers``, the mean over all of them, in which a worker that did not send a frequency counts with zero.
            ``senders``: the mean over those that sent it, as in DeMo's code. The update is then more than the mean of what was
            sent, so updates and memories do not add up to the gradients; for payloads that are gathered.

    Raises:
        ValueError: for a compressor that needs side information, and a selection whose downlink is the union.

    References:
        Peng et al., 2024, DeMo, https://arxiv.org/abs/2411.19870, section 3.
    """
    _checks.one_of("average", average, get_args(Average))
    if inner.side_information:
        raise ValueError(f"in_frequency cannot hold {type(inner).__name__}, which needs side information; use topk")
    if isinstance(inner.downlink(2), Union):
        raise ValueError(
            "in_frequency cannot hold a selection with downlink='union': after a mean of entries no frequency is exactly zero;"
            " use downlink='topk'"
        )
    return InFrequency(inner.block, inner, average)
