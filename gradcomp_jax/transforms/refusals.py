"""Refuses what an exchange cannot do, with the remedy."""

from collections.abc import Mapping
from typing import Any

import jax

from gradcomp_jax import _compat, _specs, kernels
from gradcomp_jax import collectives as co
from gradcomp_jax._typing import AxisName
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device, nodes_of
from gradcomp_jax.transforms.context import context_of
from gradcomp_jax.transforms.layout import Group, Layout, Segment
from gradcomp_jax.transforms.layout_rules import LayoutRules


def refuse_unbound(axis_name: AxisName | None) -> None:
    """Refuses an axis that is not bound.

    Raises:
        NameError: naming the ways to bind it.
    """
    if _compat.axis_size(axis_name) is None:
        raise NameError(
            f"the axis {axis_name!r} is not bound here: call update (and init, where state depends on the number of workers)"
            f" inside jax.shard_map, jax.pmap or jax.vmap(axis_name={axis_name!r}); in plain jax.jit wrap the chain in"
            " gradcomp_jax.unreduced(tx, mesh); or build the transformation with axis_name=None for one worker"
        )


def refuse_other_layout(layout: Layout, memories: tuple) -> None:
    """Refuses memories of other tensors than the gradient's.

    Raises:
        ValueError: if groups, segments, rows or dtypes differ.
    """
    expected = [[group.memory_rows(s) for s in segments] for group, segments in layout.groups]
    fits = [len(of) for of in memories] == [len(of) for of in expected]
    every = zip((m for of in memories for m in of), (rows for of in expected for rows in of), strict=fits)
    if not fits or any(leaf.shape[0] != rows for memory, rows in every for leaf in jax.tree.leaves(memory)):
        raise ValueError(
            "the exchange's state is of other tensors than the gradient: initialise it with parameters of the same shapes."
            " If a mask or labels have changed since, as in freezing midway, make a state of the new chain with"
            " gradcomp_jax.replace_method, or leave the chain as it was and freeze after the exchange. Of optax.lookahead's"
            " parameters only params.fast have gradients: leave it out of a train step. Parameters that lie along the"
            " exchange's own axis (FSDP) need collective=gradcomp_jax.collectives.ReduceScatter(param_specs), those along the"
            " inner axis of a hierarchy param_specs= of gradcomp_jax.hierarchical"
        )
    for (group, _), of in zip(layout.groups, memories, strict=True):
        wanted = kernels.narrow_dtype(group.memory.dtype, group.compressor.block)
        found = {str(narrow.values_of(leaf).dtype) for leaf in jax.tree.leaves(_values(of), is_leaf=narrow.is_narrow)}
        if found - {wanted}:
            raise ValueError(
                f"the exchange's memories are {', '.join(sorted(found))} in this state, and it keeps {wanted}: initialise it"
                " with the same dtype"
            )


def _values(tree: Any) -> Any:
    return jax.tree.map(lambda p: p.value, tree, is_leaf=is_per_device)


def refuse_shared(state: Any, axis_name: AxisName | None, workers: int) -> None:
    """Refuses per-device state that is the same array on all workers, where JAX tracks that.

    Raises:
        ValueError: if there are several workers, and a value does not vary over them.
    """
    if workers == 1 or not _compat.tracks_varying(axis_name):
        return
    for node in nodes_of(state, is_per_device):
        if node.kind != "replica" and not _compat.is_varying(node.value, axis_name):
            raise ValueError(
                f"the exchange's state is declared replicated over {axis_name!r}, and each worker has its own: give shard_map"
                f" gradcomp_jax.state_specs(state, axis_name={axis_name!r}) for it, not P(), in in_specs and out_specs"
                " (gradcomp_jax.init_opt_state returns state and specs)"
            )


def refuse_other_rows(group: Group, segment: Segment, payload: Any) -> None:
    """Refuses the payload of a compressor that does not encode row by row: no collective could split it.

    Raises:
        ValueError: if a leaf does not lead with the rows that were encoded.
    """
    rows = group.rows(segment)
    for leaf in jax.tree.leaves(payload):
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise ValueError(
                f"{type(group.compressor).__name__}.encode was given {rows} rows and returned {leaf.dtype}{list(leaf.shape)} in"
                " its payload: every array of a payload leads with the rows, so that a collective can split it. Return one"
                " entry for each row; what is one for the whole tensor belongs in a statistic"
            )


def refuse_around(rules: LayoutRules, layout: Layout, extra: Mapping[str, Any], axis_name: AxisName | None) -> None:
    """Refuses an exchange that does not work with the transformations around it.

    Raises:
        ValueError: for a reduce-scatter inside a hierarchy, and an exchange over the axis of a worker's devices; for a weight
            that was not read, a weight of another axis' workers, or one of gradients that are the workers' mean already.
    """
    context, names = context_of(extra), _specs.names_of(axis_name)
    if inner := set(names) & set(_specs.names_of(context.inner_axis_name or ())):
        raise ValueError(
            f"the exchange is over {axis_name!r}, and along {', '.join(map(repr, sorted(inner)))} each device has another part"
            " of the tensors: give the exchange inside the axis between workers alone, the axis_name of what is around it"
        )
    if context.weighted is not None and set(context.weighted) != set(names):
        raise ValueError(
            f"gradcomp_jax.weighted is over {context.weighted}, and the exchange inside over {names}: give both the same"
            " axis_name"
        )
    if extra.get("weight") is not None:
        raise ValueError(
            "an exchange by itself does not read weight=, and all workers would count alike: put"
            " gradcomp_jax.weighted(method, axis_name=...) around the method"
        )
    if context.weighted is not None and layout.averaged:
        raise ValueError(
            "a weight is for gradients of single workers, and some tensors of this policy come as the workers' mean"
            " ('averaged', as of gradcomp_jax.factored_dot): leave weighted out, or compress them"
        )
    if context.inner_axis_name is not None and isinstance(rules.collective, co.ReduceScatter):
        raise ValueError(
            "a reduce-scatter is for parameters that lie along the exchange's own axis; for those along the inner one give"
            " gradcomp_jax.hierarchical their param_specs"
        )
