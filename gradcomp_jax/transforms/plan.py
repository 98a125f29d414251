"""Which leaves go together through which compressor: decided from shapes alone, so that every worker agrees."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import _specs, kernels
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import Route, auto
from gradcomp_jax.collectives.routes import check
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.memory import Memory
from gradcomp_jax.transforms.cut import Cut
from gradcomp_jax.transforms.policies import Policy

View = Literal["rows", "dealt", "columns", "tree"]

# Entries from which a leaf that goes dense is a piece of its own: joined, it would wait for all the others.
_SMALL = 2**18

# Entries of one leaf: positions within one (a matrix, a row of any block) are int32.
_MOST = 2**31 - 1


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


class Plan(NamedTuple):
    """What becomes of every leaf.

    Attributes:
        parts: with their pieces.
        averaged: leaves that are the workers' mean already.
    """

    parts: list[tuple[Part, list[Piece]]]
    averaged: list[int]

    def starts(self, number: int) -> list[int]:
        """The number of the first row of each piece of a part, among all rows of the part."""
        part, members = self.parts[number]
        return list(itertools.accumulate((part.owned_rows(p) for p in members), initial=0))[:-1]

    def buckets(self, leaves: Sequence[Sequence[int]] | None) -> list[list[list[int]]]:
        """For each bucket and part the numbers of its pieces; a piece goes with the last of its leaves.

        Args:
            leaves: the leaves of each bucket, by their numbers in the tree; ``None`` for one bucket.
        """
        if leaves is None:
            return [[list(range(len(members))) for _, members in self.parts]]
        of_leaf = {i: b for b, members in enumerate(leaves) for i in members}
        places = [[max(of_leaf[i] for i in piece.leaves) for piece in members] for _, members in self.parts]
        used = sorted({place for of_part in places for place in of_part}) or [0]
        return [[[j for j, place in enumerate(of) if place == b] for of in places] for b in used]


@dataclasses.dataclass(frozen=True)
class Planner:
    """Turns a policy into parts, for any tree.

    Attributes:
        policy: which compressor for which tensor.
        memory: of the compressed tensors.
        route: theirs.
        view: theirs.
        dense: the part of what goes dense, small leaves joined into one piece.
    """

    policy: Policy
    memory: Memory
    route: Route
    view: View | None
    dense: Part

    def __post_init__(self) -> None:
        """Refuses, before a tensor is seen, what is known not to go together."""
        for compressor in self.policy.compressors():
            self._part(compressor)

    def _part(self, compressor: Compressor) -> Part:
        view: View = "dealt" if compressor.deals else "rows"
        return Part(compressor, self.memory, self.route, self.view or view)

    def whole(self, tree: PyTree, axis_name: AxisName | None, workers: int) -> PyTree:
        """The shapes of whole tensors, for a tree with shards of those that lie along the axis."""
        if self.route.kind != "reduce_scatter" or axis_name is None:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        for i, spec in enumerate(_specs.by_leaf(self.route.param_specs, tree)):
            dim, shape = _specs.sharded_dim(spec, axis_name), jnp.shape(leaves[i])
            if dim is not None:
                shape = (*shape[:dim], shape[dim] * workers, *shape[dim + 1 :])
            leaves[i] = jax.ShapeDtypeStruct(shape, jnp.result_type(leaves[i]))
        return jax.tree.unflatten(treedef, leaves)

    def plan(self, tree: PyTree, axis_name: AxisName | None = None, workers: int = 1) -> Plan:
        """Cuts a tree into pieces: one a leaf (one in all with the view ``tree``), small ones that go dense together.

        Leaves without entries are in none.

        Args:
            tree: of arrays or shapes; whole, also where parameters are sharded.
            axis_name: the axis of the workers.
            workers: how many there are.

        Raises:
            TypeError: for a leaf that is not a real floating-point array.
            ValueError: for a leaf that the policy has no rule for, whose sharded dimension does not divide, or that has
                2**31 entries or more.
        """
        cuts = self._cuts(tree, axis_name, workers)
        chosen: dict[Compressor, list[Piece]] = {compressor: [] for compressor in self.policy.compressors()}
        dense: list[Piece] = []
        averaged: list[int] = []
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise TypeError(
                    f"the leaf {path_name(path)!r} has dtype {jnp.result_type(leaf)}; only real floating-point "
                    "gradients are exchanged; leave other leaves out with optax.masked"
                )
            spec = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
            if spec.size > _MOST:
                raise ValueError(
                    f"the leaf {path_name(path)!r} of shape {spec.shape} has {spec.size} entries, and one leaf may have at"
                    f" most {_MOST}: shard it along a model axis (gradcomp_jax.model_parallel), or split it into several"
                )
            choice = self.policy.choose(path_name(path), spec)
            if choice == "averaged":
                averaged.append(i)
            elif spec.size == 0:
                continue
            elif isinstance(choice, Compressor):
                self._check_columns(path_name(path), spec, choice)
                chosen.setdefault(choice, []).append(_piece(i, spec, cuts[i]))
            else:
                dense.append(_piece(i, spec, cuts[i]))
        parts = [*((self._part(compressor), members) for compressor, members in chosen.items()), (self.dense, dense)]
        return Plan([routed for part, members in parts for routed in self._by_route(part, members)], averaged)

    def _cuts(self, tree: PyTree, axis_name: AxisName | None, workers: int) -> list[Cut | None]:
        """How every leaf is divided among owners; ``None`` for what all of them want whole."""
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        if self.route.kind != "reduce_scatter" or axis_name is None:
            return [None] * len(leaves)
        result: list[Cut | None] = []
        for (path, leaf), spec in zip(leaves, _specs.by_leaf(self.route.param_specs, tree), strict=True):
            dim = _specs.sharded_dim(spec, axis_name)
            cut = None if dim is None else Cut(workers, dim)
            if cut:
                cut.check(path_name(path), jnp.shape(leaf))
            result.append(cut)
        return result

    def _by_route(self, part: Part, members: list[Piece]) -> list[tuple[Part, list[Piece]]]:
        """A part as it is; or, in a reduce-scatter, what is cut by owner, and what all workers want whole."""
        if self.route.kind != "reduce_scatter":
            return [(part, self._together(part, members))]
        owned = dataclasses.replace(part, route=self.route)
        rest = dataclasses.replace(part, route=auto(second_encoding=part.route.second_encoding))
        whole = self._together(part, [p for p in members if not p.cut])
        return [(owned, [p for p in members if p.cut]), (rest, whole)]

    def _together(self, part: Part, members: list[Piece]) -> list[Piece]:
        if part is self.dense:
            return _joined(members, _SMALL)
        return _joined(members, None) if self.view == "tree" else members

    def _check_columns(self, path: str, leaf: jax.ShapeDtypeStruct, compressor: Compressor) -> None:
        if self.view == "columns" and (leaf.size // leaf.shape[-1] if leaf.shape else 0) % compressor.block:
            raise ValueError(
                f"view='columns' cuts {path!r} of shape {leaf.shape} across columns: blocks of {compressor.block} entries"
                " do not divide them; use a compressor made for the shape, or view='rows'"
            )


def _joined(members: list[Piece], below: int | None) -> list[Piece]:
    """One piece of all those that are small enough, the others by themselves."""
    small = [p for p in members if below is None or p.size < below]
    large = [p for p in members if below is not None and p.size >= below]
    if not small:
        return large
    leaves = tuple(i for p in small for i in p.leaves)
    periods = tuple(n for p in small for n in p.periods)
    return [*large, Piece(leaves, sum(p.size for p in small), periods=periods)]


def _piece(number: int, leaf: jax.ShapeDtypeStruct, cut: Cut | None) -> Piece:
    shape = leaf.shape
    if cut and cut.dim is not None:
        # A share is laid out with the divided dimension outermost.
        shape = (shape[cut.dim], *shape[: cut.dim], *shape[cut.dim + 1 :])
    return Piece((number,), leaf.size, cut, kernels.periods_of(shape))


def path_name(path: tuple) -> str:
    """A tree path as text: ``"dense/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
