"""Refuses what an exchange cannot do, with the remedy."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat, _origins, _specs, kernels
from gradcomp_jax import collectives as co
from gradcomp_jax._errors import listed
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.context import context_of
from gradcomp_jax.core.layout import Group, Layout, Segment
from gradcomp_jax.core.layout_rules import LayoutRules
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device, nodes_of


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
            listed(
                "the exchange's state is of other tensors than the gradient",
                "initialise it with parameters of the same shapes",
                "if a mask or labels have changed since, as in freezing midway, make a state of the new chain with"
                " gradcomp_jax.replace_method, or leave the chain as it was and freeze after the exchange",
                "parameters that lie along the exchange's own axis (FSDP) need"
                " collective=gradcomp_jax.collectives.ReduceScatter(param_specs)",
                "parameters that lie along the inner axis of a hierarchy need param_specs= of gradcomp_jax.hierarchical",
                "of optax.lookahead's parameters only params.fast have gradients: leave it out of a train step",
            )
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


def refuse_beyond_float32(tree: PyTree, but: Iterable[int] = ()) -> None:
    """Refuses leaves that a cast to float32 would change: complex numbers, and floats of more digits and range.

    Args:
        tree: gradients, or parameters that are compared.
        but: numbers of leaves that pass through as they are.

    Raises:
        TypeError: naming the first such leaf.
    """
    passing = set(but)
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        dtype = jnp.result_type(leaf)
        if i in passing or not jnp.issubdtype(dtype, jnp.inexact):
            continue
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"the gradient {path_name(path)!r} is {dtype}, and only real ones are taken here: put"
                " optax.contrib.split_real_and_imaginary around the whole chain"
            )
        if dtype.itemsize > 4:
            raise TypeError(
                f"the leaf {path_name(path)!r} is {dtype}, and what crosses and what is kept is float32: cast gradients first,"
                ' by jax.tree.map(lambda g: g.astype("float32"), gradient) or, as a link before this one,'
                ' optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype("float32"), g)), and parameters where'
                " replicas are compared; or keep the leaf out with optax.multi_transform and gradcomp_jax.set_to_zero()"
            )


def refuse_reduced(updates: PyTree, axis_name: AxisName | None, averaged: Iterable[int] = ()) -> None:
    """Refuses a gradient that does not vary over the axis: it was summed already, and nothing is left to compress.

    Where JAX does not track that, a gradient is refused if the traced equations show that it comes from a collective
    (``gradcomp_jax._origins``). Leaves whose numbers are in ``averaged`` are means on purpose.

    Raises:
        ValueError: naming the first such leaf.
    """
    expected = set(averaged)
    # An empty array has nothing to reduce, and a select of empty arrays is a constant; integers have no gradient.
    named = [
        (path, leaf)
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(updates))
        if i not in expected and jnp.size(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if not _compat.tracks_varying(axis_name):
        _refuse_summed(named, axis_name)
        return
    for path, leaf in named:
        if not _compat.is_varying(leaf, axis_name):
            raise ValueError(
                listed(
                    f"the gradient {path_name(path)!r} is already reduced over {axis_name!r}",
                    "inside jax.shard_map, jax.grad with respect to replicated parameters inserts a dense all-reduce of its"
                    f" own: differentiate with gradcomp_jax.local_value_and_grad(loss, axis_name={axis_name!r}), or cast the"
                    f" parameters first with jax.lax.pcast(params, {axis_name!r}, to='varying')",
                    "after another exchange in the chain it is the mean, and one exchange is enough: leave one out, or give"
                    " each its own leaves with optax.masked",
                    "optax.MultiSteps around an exchange reduces too: accumulate with gradcomp_jax.accumulate",
                )
            )


def _refuse_summed(named: list[tuple[Any, Any]], axis_name: AxisName | None) -> None:
    """Refuses gradients that a collective has reduced before, as far as equations show it."""
    if axis_name is None or (_compat.axis_size(axis_name) or 1) == 1:
        return
    reduced = _origins.is_reduced([leaf for _, leaf in named], axis_name)
    # A vector beside other tensors goes dense anyway, and may not be a gradient but a count or a statistic of all workers.
    found = [
        path for (path, x), is_so in zip(named, reduced, strict=True) if is_so and (all(reduced) or jnp.ndim(x) > 1)
    ]
    if found:
        raise ValueError(
            listed(
                f"the gradient {path_name(found[0])!r} is already reduced over {axis_name!r}, and nothing is left to compress",
                "a pmean, psum or all_gather before the exchange has sent it densely: leave that out, because the exchange"
                " takes each worker's own gradient and returns the mean",
                "a function that reduces by itself, such as one that takes pmap_axis_name, is given None for the name",
                "after another exchange, one is enough",
            )
        )
