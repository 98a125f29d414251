"""Which leaves go together through which compressor: decided from shapes alone, so that every worker agrees."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.collectives import Route
from gradcomp_jax.collectives.routes import check
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.memory import Memory
from gradcomp_jax.transforms.policies import Policy

View = Literal["rows", "columns", "tree"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A compressor with its memory and route, and what it is responsible for.

    Attributes:
        compressor: encodes rows.
        memory: what stays behind.
        route: how payloads cross.
        view: how leaves are cut into rows: ``rows``, stretches of a leaf; ``columns``, a leaf's columns (its last
            dimension), each cut by itself; ``tree``, all leaves together, of which row j of R has the entries j, j + R, ...
    """

    compressor: Compressor
    memory: Memory
    route: Route
    view: View = "rows"

    def __post_init__(self) -> None:
        """Refuses combinations that cannot keep the laws."""
        check(self.route, self.compressor, self.memory)

    def join(self, piece: "Piece", leaves: Mapping[int, Array]) -> Array:
        """Float32 rows of a piece's leaves, given by their number in the tree."""
        block, first = self.compressor.block, leaves[piece.leaves[0]]
        if self.view == "columns":
            return kernels.as_rows(jnp.moveaxis(first, -1, 0), block)
        if len(piece.leaves) > 1:
            first = jnp.concatenate([leaves[i].reshape(-1).astype(jnp.float32) for i in piece.leaves])
        if self.view == "rows":
            return kernels.as_rows(first, block)
        return kernels.as_rows(first, self.rows(piece), rows=block).T

    def split(self, piece: "Piece", rows: Array, like: Sequence[Array]) -> dict[int, Array]:
        """Inverse of :meth:`join`: leaf index to an array of that leaf's shape and dtype."""
        if self.view == "tree":
            rows = rows.T
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

    def rows(self, piece: "Piece") -> int:
        """How many rows a piece has."""
        return kernels.row_count(piece.size, self.compressor.block)

    def counts(self, piece: "Piece") -> Array:
        """How many entries of each row are not padding: int32 ``[rows]``."""
        if self.view != "tree":
            return kernels.valid_counts(piece.size, self.compressor.block)
        rows = self.rows(piece)
        return (piece.size - jax.lax.iota(jnp.int32, rows) + (rows - 1)) // rows

    def padded(self, piece: "Piece") -> bool:
        """Whether the rows hold more than the piece has."""
        return piece.size % self.compressor.block != 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """One vector to compress: a single leaf, or several leaves joined end to end."""

    leaves: tuple[int, ...]
    size: int


class Plan(NamedTuple):
    """What becomes of every leaf.

    Attributes:
        parts: with their pieces.
        averaged: leaves that are the workers' mean already.
    """

    parts: list[tuple[Part, list[Piece]]]
    averaged: list[int]


@dataclasses.dataclass(frozen=True)
class Planner:
    """Turns a policy into parts, for any tree.

    Attributes:
        policy: which compressor for which tensor.
        memory: of the compressed tensors.
        route: theirs.
        view: theirs.
        dense: the part of what goes dense, all of it joined into one piece.
    """

    policy: Policy
    memory: Memory
    route: Route
    view: View
    dense: Part

    def __post_init__(self) -> None:
        """Refuses, before a tensor is seen, what is known not to go together."""
        for compressor in self.policy.compressors():
            self._part(compressor)

    def _part(self, compressor: Compressor) -> Part:
        return Part(compressor, self.memory, self.route, self.view)

    def plan(self, tree: PyTree) -> Plan:
        """Cuts a tree into pieces: one a leaf (one in all with the view ``tree``), and one of all that goes dense.

        Leaves without entries are in none.

        Raises:
            TypeError: for a leaf that is not a real floating-point array.
            ValueError: for a leaf that the policy has no rule for.
        """
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
            choice = self.policy.choose(path_name(path), spec)
            if choice == "averaged":
                averaged.append(i)
            elif spec.size == 0:
                continue
            elif isinstance(choice, Compressor):
                self._check_columns(path_name(path), spec, choice)
                chosen.setdefault(choice, []).append(Piece((i,), spec.size))
            else:
                dense.append(Piece((i,), spec.size))
        parts = [
            (self._part(compressor), _joined(members) if self.view == "tree" else members)
            for compressor, members in chosen.items()
        ]
        return Plan([*parts, (self.dense, _joined(dense))], averaged)

    def _check_columns(self, path: str, leaf: jax.ShapeDtypeStruct, compressor: Compressor) -> None:
        if self.view == "columns" and (leaf.size // leaf.shape[-1] if leaf.shape else 0) % compressor.block:
            raise ValueError(
                f"view='columns' cuts {path!r} of shape {leaf.shape} across columns: blocks of {compressor.block} entries"
                " do not divide them; use a compressor made for the shape, or view='rows'"
            )


def _joined(members: list[Piece]) -> list[Piece]:
    if not members:
        return []
    return [Piece(tuple(i for p in members for i in p.leaves), sum(p.size for p in members))]


def path_name(path: tuple) -> str:
    """A tree path as text: ``"dense/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
