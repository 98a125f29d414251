"""A compressor with its memory and route, and how the tensors that it is responsible for are cut into rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array
from gradcomp_jax.collectives import Route
from gradcomp_jax.collectives.routes import check
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.memory import Memory
from gradcomp_jax.transforms.cut import Cut

View = Literal["rows", "dealt", "columns", "tree"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A compressor with its memory and route, and what it is responsible for.

    Attributes:
        compressor: encodes rows.
        memory: what stays behind.
        route: how payloads cross.
        view: how leaves are cut into rows: ``rows``, stretches of a leaf; ``columns``, a leaf's columns (its last
            dimension), each cut by itself; ``dealt``, a leaf's entries dealt out in turn, so that row j of R has the entries
            j, j + R, ...; ``tree``, those of all leaves together.
            Of these two, memories lie as the leaves do all the same, in stretches.
    """

    compressor: Compressor
    memory: Memory
    route: Route
    view: View = "rows"

    def __post_init__(self) -> None:
        """Refuses combinations that cannot keep the laws."""
        check(self.route, self.compressor, self.memory)
        if self.route.kind == "reduce_scatter" and self.view not in ("rows", "dealt"):
            raise ValueError(f"a reduce-scatter cuts tensors by owner, view={self.view!r} otherwise; use view='rows'")

    def join(self, piece: "Piece", leaves: Mapping[int, Array]) -> Array:
        """Float32 rows of a piece's leaves, given by their number in the tree, in the order of the memory: not dealt."""
        block, first = self.compressor.block, leaves[piece.leaves[0]]
        if piece.cut:
            # Each owner's share by itself, its last row filled up.
            shares = piece.cut.flat(first).astype(jnp.float32)
            padding = self.kept_rows(piece) // piece.owners * block - shares.shape[1]
            return jnp.pad(shares, ((0, 0), (0, padding))).reshape(-1, block)
        if self.view == "columns":
            return kernels.as_rows(jnp.moveaxis(first, -1, 0), block)
        if len(piece.leaves) > 1:
            first = jnp.concatenate([leaves[i].reshape(-1).astype(jnp.float32) for i in piece.leaves])
        return kernels.as_rows(first, block)

    def split(self, piece: "Piece", rows: Array, like: Sequence[Array]) -> dict[int, Array]:
        """Inverse of :meth:`join`: leaf index to an array of that leaf's dtype and shape, or that of an owner's share."""
        if piece.cut:
            leaf = like[piece.leaves[0]]
            share = kernels.from_rows(rows, (leaf.size // piece.cut.devices,), leaf.dtype)
            return {piece.leaves[0]: piece.cut.unflat(share, leaf.shape)}
        if len(piece.leaves) == 1:
            leaf = like[piece.leaves[0]]
            if self.view != "columns":
                return {piece.leaves[0]: kernels.from_rows(rows, leaf.shape, leaf.dtype)}
            turned = kernels.from_rows(rows, (leaf.shape[-1], *leaf.shape[:-1]), leaf.dtype)
            return {piece.leaves[0]: jnp.moveaxis(turned, 0, -1)}
        flat, start, result = rows.reshape(-1), 0, {}
        for i in piece.leaves:
            part = jax.lax.slice(flat, (start,), (start + like[i].size,))
            result[i] = part.reshape(like[i].shape).astype(like[i].dtype)
            start += like[i].size
        return result

    @property
    def dealt(self) -> bool:
        """Whether entries are dealt out over the rows."""
        return self.view in ("dealt", "tree")

    def kept_rows(self, piece: "Piece") -> int:
        """How many rows the memory of a piece has."""
        return kernels.row_count(piece.size // piece.owners, self.compressor.block) * piece.owners

    def kept_counts(self, piece: "Piece") -> Array:
        """How many entries of each of those are not padding: int32 ``[rows]``."""
        return jnp.tile(kernels.valid_counts(piece.size // piece.owners, self.compressor.block), piece.owners)

    def deal(self, piece: "Piece") -> kernels.Deal:
        """How a piece, or each owner's share of it, is dealt."""
        block, size = self.compressor.block, self.kept_rows(piece) // piece.owners * self.compressor.block
        return kernels.Deal(size, block, kernels.dealt_rows(size, block, piece.periods))

    def blocks(self, piece: "Piece", kept: Array) -> Array:
        """The rows that are encoded, of those that lie as the memory does: float32 ``[rows, block]``."""
        if not self.dealt:
            return kept
        flat = kept.reshape(piece.owners, -1)
        return jax.vmap(self.deal(piece).blocks)(flat).reshape(-1, self.compressor.block)

    def encode(self, piece: "Piece", kept: Array, state: Any, key: Array, **given: Any) -> tuple[Any, Any]:
        """Payload and state of rows that lie as the memory does."""
        if not self.dealt or piece.owners > 1:
            return self.compressor.encode(self.blocks(piece, kept), state, key, **given)
        return self.compressor.encode_dealt(kept.reshape(-1), self.deal(piece), state, key, **given)

    def decode(self, piece: "Piece", payload: Any, shared: Array | None) -> Array:
        """A worker's own payload as rows that lie as the memory does."""
        if not self.dealt:
            return self.compressor.decode(payload, shared=shared)
        if piece.owners == 1:
            return self.compressor.decode_dealt(payload, self.deal(piece), self.compressor.block, shared=shared)
        rows = self.compressor.decode(payload, shared=shared)
        by_owner = rows.reshape(piece.owners, -1, self.compressor.block)
        return jax.vmap(self.deal(piece).flat)(by_owner).reshape(-1, self.compressor.block)

    def carried(self, piece: "Piece", payload: Any, shared: Array | None) -> Array:
        """Which of those entries are not zero: boolean."""
        if not self.dealt:
            return self.compressor.carried(payload, shared=shared)
        return self.decode(piece, payload, shared) != 0

    def laid(self, piece: "Piece", like: Array | None = None) -> tuple[kernels.Deal, int] | None:
        """How a mean is wanted: as the memory lies, or as a leaf does; ``None`` where rows are not dealt."""
        if not self.dealt:
            return None
        width = self.compressor.block
        if like is not None and like.size == piece.size and not self.padded(piece) and like.ndim > 1:
            width = max(like.shape[-1], 1)
        return self.deal(piece), width

    def rows(self, piece: "Piece") -> int:
        """How many rows a piece has."""
        return self.owned_rows(piece) * piece.owners

    def owned_rows(self, piece: "Piece") -> int:
        """How many of them a worker receives the mean of: all, or those of its share."""
        if self.dealt:
            return self.deal(piece).rows
        return kernels.row_count(piece.size // piece.owners, self.compressor.block)

    def counts(self, piece: "Piece") -> Array:
        """How many entries of each row are not padding: int32 ``[rows]``."""
        if not self.dealt:
            return self.kept_counts(piece)
        rows = self.owned_rows(piece)
        each, left = divmod(piece.size // piece.owners, rows)
        one = each + (jax.lax.iota(jnp.int32, rows) < left).astype(jnp.int32)
        return jnp.tile(one, piece.owners)

    def padded(self, piece: "Piece") -> bool:
        """Whether the rows hold more than the piece has."""
        return (piece.size // piece.owners) % self.compressor.block != 0

    def joined(self, members: Sequence["Piece"], arrays: Sequence[Array]) -> Array:
        """One array of all pieces' rows ``[rows, ...]``: one after the other, or of one owner after the other."""
        if len(arrays) == 1 or self.route.kind != "reduce_scatter":
            return jnp.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        by_owner = [a.reshape(p.cut.devices, -1, *a.shape[1:]) for p, a in zip(members, arrays, strict=True) if p.cut]
        return jnp.concatenate(by_owner, axis=1).reshape(-1, *arrays[0].shape[1:])


@dataclasses.dataclass(frozen=True)
class Piece:
    """One vector to compress: a single leaf, or several leaves joined end to end.

    Attributes:
        leaves: their numbers in the tree.
        size: entries.
        cut: among the workers, of which each owns a share, where the parameter lies along their axis.
        periods: lengths after which its structure repeats.
    """

    leaves: tuple[int, ...]
    size: int
    cut: Cut | None = None
    periods: tuple[int, ...] = ()

    @property
    def owners(self) -> int:
        """Among how many workers it is divided; 1 where all of them want it whole."""
        return self.cut.devices if self.cut else 1
