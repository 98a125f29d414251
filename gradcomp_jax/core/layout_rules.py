"""The rules that make a layout: decided from shapes alone, so that all workers agree."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, _specs, kernels
from gradcomp_jax import collectives as co
from gradcomp_jax import memory as mem
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.compressors import Compressor, dense
from gradcomp_jax.core.beside import with_parts
from gradcomp_jax.core.layout import Group, Layout, Segment, View
from gradcomp_jax.core.masks import Mask, by_leaf, gains
from gradcomp_jax.core.overwritten import refuse_overwritten
from gradcomp_jax.core.policies import ByPath, Policy, warn_of_idle_patterns
from gradcomp_jax.core.shards import Shards

# A dense leaf of at least so many entries is its own segment: joined with others, it would wait for all of them.
_SMALL = 2**18

# The most entries of a leaf: positions within one (a matrix, a row of any block) are int32.
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class LayoutRules:
    """Makes the layout of any tree.

    Attributes:
        policy: which compressor for which tensor.
        mask: the leaves that the policy is asked about; the others go dense.
        memory: memory of the compressed tensors.
        collective: collective of the compressed tensors.
        view: view of the compressed tensors; ``None`` for the compressor's default.
        dense: the group of the leaves that go dense, small ones joined into one segment.
    """

    policy: Policy
    mask: Mask = dataclasses.field(hash=False)
    memory: mem.Memory
    collective: co.Collective
    view: View | None
    dense: Group

    def __post_init__(self) -> None:
        """Refuses combinations that cannot work, before a tensor is seen."""
        for compressor in self.policy.compressors():
            self._group(compressor)

    def _group(self, compressor: Compressor) -> Group:
        view: View = "dealt" if compressor.deals else "rows"
        # Where all entries are sent, no velocity is stopped.
        memory = self.memory if compressor.is_sparsifier else self.memory.on_dense(lossless=False)
        return Group(compressor, memory, self.collective, self.view or view)

    def whole(self, tree: PyTree, axis_name: AxisName | None, workers: int) -> PyTree:
        """Returns the shapes of whole tensors, for a tree that holds shards of the tensors that lie along the axis."""
        if not isinstance(self.collective, co.ReduceScatter) or axis_name is None:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        for i, spec in enumerate(_specs.by_leaf(self.collective.param_specs, tree)):
            dim, shape = _specs.sharded_dim(spec, axis_name), jnp.shape(leaves[i])
            if dim is not None:
                shape = (*shape[:dim], shape[dim] * workers, *shape[dim + 1 :])
            leaves[i] = jax.ShapeDtypeStruct(shape, jnp.result_type(leaves[i]))
        return jax.tree.unflatten(treedef, leaves)

    def layout(self, tree: PyTree, axis_name: AxisName | None = None, workers: int = 1) -> Layout:
        """Divides a tree into segments: one for each leaf, or one in all with the view ``tree``.

        Small leaves that go dense share a segment; leaves without entries are in none. The tree is of arrays or shapes, and of
        whole tensors, also where parameters are sharded.

        Raises:
            TypeError: for a leaf that is not a real floating-point array.
            ValueError: for a leaf that the policy has no rule for, whose sharded dimension does not divide, or that has
                2**31 entries or more; for a mask of another structure, what Flax overwrites with its gradient, and a
                collective that does not work with this number of workers.
        """
        refuse_overwritten(tree)
        tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)
        masked = by_leaf(self.mask, tree)
        shards = self._shards(tree, axis_name, workers)
        chosen: dict[Compressor, list[Segment]] = {compressor: [] for compressor in self.policy.compressors()}
        dense: list[Segment] = []
        averaged: list[int] = []
        named = [(path_name(path), spec) for path, spec in jax.tree_util.tree_leaves_with_path(tree)]
        warn_of_idle_patterns(self.policy, [name for name, _ in named])
        for i, (name, spec) in enumerate(named):
            _check_leaf(name, spec)
            choice = self.policy.choose(name, spec) if masked[i] else "dense"
            if choice == "averaged":
                averaged.append(i)
            elif spec.size == 0:
                continue
            elif isinstance(choice, Compressor):
                self._check_columns(name, spec, choice)
                chosen.setdefault(choice, []).append(_segment(i, spec, shards[i]))
            else:
                dense.append(_segment(i, spec, shards[i]))
        groups = [
            *((self._group(compressor), segments) for compressor, segments in chosen.items()),
            (self.dense, dense),
        ]
        divided = [(group, group.placed(segments)) for pair in groups for group, segments in self._by_owner(*pair)]
        crossings = [group.crossing(segments, workers) for group, segments in divided]
        return with_parts(Layout(divided, averaged, crossings))

    def _shards(self, tree: PyTree, axis_name: AxisName | None, workers: int) -> list[Shards | None]:
        """Returns how every leaf is divided among owners; ``None`` for a leaf that every worker wants whole."""
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        if not isinstance(self.collective, co.ReduceScatter) or axis_name is None:
            return [None] * len(leaves)
        result: list[Shards | None] = []
        for (path, leaf), spec in zip(leaves, _specs.by_leaf(self.collective.param_specs, tree), strict=True):
            dim = _specs.sharded_dim(spec, axis_name)
            shards = None if dim is None else Shards(workers, dim)
            if shards:
                shards.check(path_name(path), jnp.shape(leaf))
            result.append(shards)
        return result

    def _by_owner(self, group: Group, segments: list[Segment]) -> list[tuple[Group, list[Segment]]]:
        """Returns a group unchanged; for a reduce-scatter, one group that is divided among owners and one that is not."""
        if not isinstance(self.collective, co.ReduceScatter):
            return [(group, self._joined(group, segments))]
        owned = dataclasses.replace(group, collective=self.collective)
        rest = group if isinstance(group.collective, co.Auto) else dataclasses.replace(group, collective=co.Auto())
        whole = self._joined(group, [s for s in segments if not s.shards])
        return [(owned, [s for s in segments if s.shards]), (rest, whole)]

    def _joined(self, group: Group, segments: list[Segment]) -> list[Segment]:
        if group is self.dense:
            return _join(segments, _SMALL)
        return _join(segments, None) if self.view == "tree" else segments

    def _check_columns(self, path: str, leaf: jax.ShapeDtypeStruct, compressor: Compressor) -> None:
        if self.view == "columns" and (leaf.size // leaf.shape[-1] if leaf.shape else 0) % compressor.block:
            raise ValueError(
                f"view='columns' divides {path!r} of shape {leaf.shape} into columns: blocks of {compressor.block} entries"
                " do not divide them; use a compressor made for the shape, or view='rows'"
            )


def _check_leaf(path: str, leaf: jax.ShapeDtypeStruct) -> None:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(
            f"the leaf {path!r} has dtype {leaf.dtype}, and only real gradients are exchanged: put"
            " optax.contrib.split_real_and_imaginary around the whole chain"
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"the leaf {path!r} has dtype {leaf.dtype}; only real floating-point gradients are exchanged; keep other leaves"
            " out with optax.multi_transform and gradcomp_jax.set_to_zero()"
        )
    if leaf.size > _MOST:
        raise ValueError(
            f"the leaf {path!r} of shape {leaf.shape} has {leaf.size} entries, and one leaf may have at most {_MOST}: shard"
            " it along a model axis (gradcomp_jax.model_parallel), or split it into several"
        )


def _join(segments: list[Segment], below: int | None) -> list[Segment]:
    """Returns one segment of all those that are small enough, and each of the others by itself."""
    small = [s for s in segments if below is None or s.size < below]
    large = [s for s in segments if below is not None and s.size >= below]
    if not small:
        return large
    leaves = tuple(i for s in small for i in s.leaves)
    periods = tuple(n for s in small for n in s.periods)
    return [*large, Segment(leaves, sum(s.size for s in small), periods=periods)]


def _segment(number: int, leaf: jax.ShapeDtypeStruct, shards: Shards | None) -> Segment:
    shape = leaf.shape
    if shards and shards.dim is not None:
        # A shard is laid out with the divided dimension outermost.
        shape = (shape[shards.dim], *shape[: shards.dim], *shape[shards.dim + 1 :])
    return Segment((number,), leaf.size, shards, kernels.periods_of(shape), shape)


def layout_rules(
    compressor: Compressor | Policy,
    *,
    memory: mem.Memory | None = None,
    collective: co.Collective | str = "auto",
    mask: Mask | None = None,
    view: View | None = None,
    dense_compressor: Compressor | None = None,
) -> LayoutRules:
    """Returns the rules that :func:`exchange` follows for the same arguments."""
    memory = mem.residual() if memory is None else memory
    dense_compressor = dense() if dense_compressor is None else dense_compressor
    policy: Policy
    if isinstance(compressor, Policy):
        policy, mask = (compressor, True) if mask is None else (compressor.masked(), mask)
    elif not isinstance(compressor, Compressor):
        raise TypeError(
            f"exchange takes a compressor or a policy, got {_arguments.said(compressor)}; build one with"
            f" gradcomp_jax.compressors, gradcomp_jax.by_size or gradcomp_jax.by_path{_arguments.meant(compressor)}"
        )
    else:
        policy = ByPath("", compressor, otherwise=None)  # "" is found in every path
        mask = gains(compressor, dense_compressor) if mask is None else mask
    if view is not None:
        _checks.one_of("view", view, get_args(View))
    on_dense = memory.on_dense(lossless=dense_compressor.lossless)
    dense_group = Group(dense_compressor, on_dense, co.Auto(lossy_downlink=True))
    return LayoutRules(policy, mask, memory, co.as_collective(collective), view, dense_group)
