"""Which leaves go together through which compressor: decided from shapes alone, so that every worker agrees."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp_jax import _specs, kernels
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.collectives import Route, auto
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.memory import Memory
from gradcomp_jax.transforms.cut import Cut
from gradcomp_jax.transforms.part import Part as Part
from gradcomp_jax.transforms.part import Piece as Piece
from gradcomp_jax.transforms.part import View as View
from gradcomp_jax.transforms.policies import Policy

# Entries from which a leaf that goes dense is a piece of its own: joined, it would wait for all the others.
_SMALL = 2**18

# Entries of one leaf: positions within one (a matrix, a row of any block) are int32.
_MOST = 2**31 - 1


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
