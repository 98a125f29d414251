"""Row-wise selection: the largest entries of every block, with their positions."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _arguments, _checks, _registered, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import LARGEST, Compressor, RowInfo, add_up, index_dtype
from gradcomp_jax.compressors.union import Union

MAX_BLOCK = 65536

_MOST_COMPARED = 128
"""Up to so many pairs of a row's positions are compared; above that, positions are looked up."""


@_registered.node
@dataclasses.dataclass(frozen=True)
class TopKPayload:
    """Holds some of a row's entries.

    Attributes:
        positions: uint8, uint16 or uint32 ``[rows, k]``, distinct within a row; or uint8, ``packed``: k and the block.
        value: float32, bfloat16 or int8 ``[rows, k]``; with two bits, uint8 ``[rows, ceil(k / 4)]``.
        scale: float32 ``[rows, 1]``, the unit of int8 values; bfloat16 ``[rows, 2]``, the magnitudes of two bits; or ``None``.
    """

    positions: Array
    value: Array
    scale: Array | None = None
    packed: tuple[int, int] = dataclasses.field(default=(0, 0), metadata={"static": True})

    @property
    def index(self) -> Array:
        """Returns the positions, integer ``[rows, k]``."""
        return kernels.from_elias_fano(self.positions, *self.packed) if self.packed[0] else self.positions

    def numbers(self) -> Array:
        """Returns the entries' values, float32 ``[rows, k]``."""
        if self.scale is not None and self.scale.shape[-1] == 2:
            return kernels.from_two_levels(self.value, self.scale, self.index.shape[-1])
        value = self.value.astype(jnp.float32)
        return value if self.scale is None else value * self.scale


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """Implements :func:`topk`."""

    k: int
    k_downlink: int
    dtype: Any
    downlink_code: Literal["topk", "union"] | Compressor = "topk"
    bits: int | None = None
    exact: bool = False
    pack_positions: bool = False
    is_sparsifier = True
    drops = True
    by_row = True
    deals = True  # neighbours in a tensor are large together
    zeroes = True

    @property
    def decodes_anew(self) -> bool:  # type: ignore[override]
        """Returns whether entries are few: few are placed by comparing, many are scattered."""
        return self.k <= kernels.ROUNDS

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[TopKPayload, PyTree]:
        """Takes the ``k`` largest magnitudes of every row. A row of zeros sends ``k`` zeros."""
        if not self.exact and self.dtype != jnp.float32:
            return self._payload(*kernels.top_entries(rows, self.k)), state
        index = (kernels.exact_top_of_rows if self.exact else kernels.top_of_rows)(rows, self.k)
        return self._payload(index, kernels.take_from_rows(rows, index)), state

    def encode_dealt(self, flat: Array, deal: kernels.Deal, state: PyTree, info: RowInfo) -> tuple[TopKPayload, PyTree]:
        """Returns the same without transposing the tensor."""
        if self.exact:
            return self.encode(deal.blocks(flat), state, info)
        index, value = kernels.top_of_dealt(flat, deal, self.k, info.parts)
        if self.dtype == jnp.float32:
            value = kernels.take_dealt(flat, deal, index)
        return self._payload(index, value), state

    def encode_all_dealt(self, flats: Sequence[Array], deals: Sequence[kernels.Deal]) -> TopKPayload:
        """Finds the entries of all vectors together."""
        if self.exact or not kernels.reduces_lines(self.block, self.k):
            return super().encode_all_dealt(flats, deals)
        index, value = kernels.top_of_all_dealt(flats, deals, self.k)
        if self.dtype == jnp.float32:
            value = kernels.take_all_dealt(flats, deals, index)
        return self._payload(index, value)

    def _payload(self, index: Array, value: Array) -> TopKPayload:
        packed = (index.shape[-1], self.block) if self.pack_positions else (0, 0)
        index, value = lax.sort((index, value), num_keys=1) if self.pack_positions else (index, value)
        index = kernels.to_elias_fano(index, self.block) if packed[0] else index.astype(index_dtype(self.block))
        if self.bits == 2:
            return TopKPayload(index, *kernels.to_two_levels(value.astype(jnp.float32)), packed)
        if self.dtype == jnp.int8:
            return TopKPayload(index, *kernels.quantize(value), packed)
        return TopKPayload(index, value.astype(self.dtype), None, packed)

    def finite(self, payload: TopKPayload, statistic: Any, largest: float = LARGEST) -> Array:
        """Checks the payload: it holds the largest entry of a block, or a mean of ``k`` entries with the largest."""
        most = largest / self.k if self.bits == 2 else largest
        return super().finite(payload, statistic, most) & kernels.all_finite(payload.numbers(), most)

    def decode(self, payload: TopKPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns the values at their positions, zeros elsewhere."""
        return kernels.place_in_rows(payload.index, payload.numbers(), self.block)

    def decode_dealt(self, payload: TopKPayload, deal: kernels.Deal, width: int, info: RowInfo = RowInfo()) -> Array:
        """Returns the values at their places in the tensor."""
        index = payload.index.astype(jnp.int32)
        if payload.scale is None and payload.value.dtype == jnp.bfloat16:
            value = payload.value if info.ok is None else jnp.where(info.ok, payload.value, 0)
            return kernels.place_packed(index, value, deal, width, wide=info.ok is not None)
        value = payload.numbers()
        return kernels.place_dealt(index, value if info.ok is None else jnp.where(info.ok, value, 0.0), deal, width)

    def reduce_dealt(self, payloads: TopKPayload, deal: kernels.Deal, width: int, info: RowInfo = RowInfo()) -> Array:
        """Adds one worker's entries after the other into one dense copy."""
        return add_up(lambda one, _: self.decode_dealt(one, deal, width, info), payloads)

    def sent_mask(self, payload: TopKPayload, info: RowInfo = RowInfo()) -> Array:
        """Returns the chosen entries, unless they are zero."""
        index = jnp.where(payload.numbers() != 0, payload.index.astype(jnp.int32), -1)
        return kernels.mark_in_rows(index, self.block)

    def reduce(self, payloads: TopKPayload, info: RowInfo = RowInfo()) -> Array:
        """Adds one worker's entries after the other into one dense copy."""

        def into_one(payloads: TopKPayload) -> Array:
            def add(i: Array, total: Array) -> Array:
                one = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), payloads)
                return kernels.place_in_rows(one.index, one.numbers(), self.block, into=total)

            return lax.fori_loop(1, payloads.value.shape[0], add, self.decode(jax.tree.map(lambda a: a[0], payloads)))

        if self.k > kernels.COMPARED:
            return into_one(payloads)
        return kernels.on_cpu(into_one, functools.partial(super().reduce, info=info), payloads)

    def downlink(self, workers: int) -> Compressor:
        """Returns a code of ``k_downlink`` entries of every block of the mean, of all entries that arrived, or another code."""
        if self.downlink_code == "topk":
            return dataclasses.replace(self, k=self.k_downlink)
        if self.downlink_code == "union":
            return Union(self.block, min(self.block, workers * self.k))
        return self.downlink_code

    def rounding(self, rows: Array, payload: TopKPayload, info: RowInfo = RowInfo()) -> TopKPayload:
        """Returns the rounding errors of the chosen values in the narrower dtype, in float32."""
        return TopKPayload(payload.index, kernels.take_from_rows(rows, payload.index) - payload.numbers())

    def left_with_owner(self, payload: TopKPayload, mean: TopKPayload) -> TopKPayload:
        """Returns the same positions. If a row's mean has fewer than ``k`` entries, nothing is subtracted.

        Values of bfloat16 stay so, rounded: a worker and the owner compute the same, and half the bytes are placed.
        """
        front = tuple(range(payload.index.ndim - mean.index.ndim))  # a mean has no axis of workers
        value, kept = payload.numbers(), jnp.expand_dims(mean.numbers(), front)
        bound = jnp.min(jnp.abs(kept), axis=-1, keepdims=True)
        index, whose = payload.index.astype(jnp.int32), jnp.expand_dims(mean.index.astype(jnp.int32), front)
        if index.shape[-1] * kept.shape[-1] <= _MOST_COMPARED:
            among = ((index[..., None] == whose[..., None, :]) & (kept != 0)[..., None, :]).any(-1)
        else:
            marks = jnp.expand_dims(kernels.place_in_rows(mean.index, mean.numbers(), self.block) != 0, front)
            among = jnp.take_along_axis(jnp.broadcast_to(marks, (*index.shape[:-1], self.block)), index, axis=-1)
        left = jnp.where(among, value, value - jnp.clip(value, -bound, bound))
        narrow = payload.scale is None and payload.value.dtype == jnp.bfloat16
        return TopKPayload(payload.index, left.astype(jnp.bfloat16) if narrow else left)


def block_for(density: float) -> int:
    """Returns the block for a density: 1024, or longer where fewer than one of 1024 entries would be sent."""
    lengths = (2**n for n in range(10, 64))
    return next(block for block in lengths if block >= MAX_BLOCK or density * block >= 0.75)


@_arguments.checked
def topk(
    density: float = 1e-3,
    *,
    block: int | None = None,
    downlink_density: float | None = None,
    downlink: Literal["topk", "union"] | Compressor = "topk",
    dtype: Any = jnp.bfloat16,
    bits: int | None = None,
    exact: bool = False,
    pack_positions: bool = False,
) -> TopK:
    """Sends the ``max(1, round(density * block))`` largest magnitudes of every block.

    Choosing within blocks gives static shapes, indices of 16 bits or fewer, and the same load on every owner of
    a two-phase exchange. The wire holds one index and one value for each entry: 4 bytes with the defaults.

    Args:
        density: fraction of the entries to send, in (0, 1].
        block: entries of a row; by default 1024, longer below a density of about 1/1365.
        downlink_density: fraction that the owners send. By default they send half as many entries again as a worker, rounded
            down, and at least one more, because workers choose different entries.
        downlink: what the owners of a two-phase exchange send: ``topk``, the largest entries of the mean; ``union``, every
            entry that any worker sent, exactly, or whole blocks where that is less; or another compressor of this block.
        dtype: dtype of the values on the wire: float32, bfloat16, or int8 with a float32 scale for each block, which pays from
            four entries of a block on. Rounding errors stay in the memory.
        bits: 2 for values of two bits: a sign, and one of two bfloat16 magnitudes, means of the smaller and the larger ones.
        exact: sorts every block, which is many times slower. Otherwise an entry may be missed because of larger ones close to
            it. With a block as long as the tensor, as in ``gc.topk_sgd(exact=True)``, this is the papers' selection.
        pack_positions: sends positions in order, in about two bits each and the logarithm of their distance.

    Raises:
        ValueError: for a density outside (0, 1], a block outside [1, 2**20], a dtype or a downlink that does not fit.
        TypeError: for a traced density.

    References:
        Aji and Heafield, 2017, https://arxiv.org/abs/1704.05021; Alistarh et al., 2018, https://arxiv.org/abs/1809.10505.
    """
    _checks.in_unit_interval("density", density)
    size = block_for(density) if block is None else _checks.positive_int("block", block)
    if size > 2**20:
        raise ValueError(f"block must be at most {2**20}, got {size}")
    k = max(1, round(density * size))
    k_downlink = min(size, k + max(1, k // 2))
    if downlink_density is not None:
        k_downlink = max(1, round(_checks.in_unit_interval("downlink_density", downlink_density) * size))
    resolved = _checks.dtype_among("dtype", dtype, ("float32", "bfloat16", "int8"))
    if bits not in (None, 2):
        raise ValueError(f"bits must be 2 or None (dtype={resolved.name} decides), got {bits}")
    if bits and resolved.name != "bfloat16":
        raise ValueError(f"bits=2 says what values are, two magnitudes in bfloat16: leave dtype out, got {dtype}")
    if isinstance(downlink, Compressor):
        if downlink.block != size:
            raise ValueError(f"the downlink has blocks of {downlink.block}, expected {size}; pass block={size} to it")
        if downlink.side_information:
            raise ValueError(f"{type(downlink).__name__} needs side information, owners have none; use block_quantized")
        if downlink_density is not None:
            raise ValueError("downlink_density is for downlink='topk'; leave one of them out")
    else:
        _checks.one_of("downlink", downlink, ("topk", "union"))
    return TopK(size, k, k_downlink, resolved, downlink, bits, exact, pack_positions)
