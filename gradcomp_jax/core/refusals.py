"""Refuses what an exchange cannot do. The checks come first; the errors, which name the remedy, are at the end."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp_jax import _compat, _origins, _specs, kernels
from gradcomp_jax import collectives as co
from gradcomp_jax._errors import listed
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core.context import context_of
from gradcomp_jax.core.layout import Group, Layout
from gradcomp_jax.memory import narrow
from gradcomp_jax.per_device import is_per_device, nodes_of


def refuse_unbound(axis_name: AxisName | None) -> None:
    """Raises a NameError for an axis that is not bound."""
    if _compat.axis_size(axis_name) is None:
        raise _unbound(axis_name)


def refuse_other_layout(layout: Layout, state: Any, workers: int) -> None:
    """Raises a ValueError for state of other tensors than the gradient's, of other workers, or in another dtype."""
    if [len(of) for of in state.memory] != [len(segments) for _, segments in layout.groups]:
        raise _other_tensors()
    for n, ((group, segments), of) in enumerate(zip(layout.groups, state.memory, strict=True)):
        for segment, memory in zip(segments, of, strict=True):
            if arrays := jax.tree.leaves(memory):
                if any(a.shape[0] != segment.memory_rows for a in arrays):
                    raise _other_tensors()
                wanted = kernels.narrow_dtype(group.memory.dtype, group.compressor.block)
                if {str(a.dtype) for a in arrays} - {"float32"} != {wanted} - {"float32"}:
                    raise _other_dtype(of, wanted)
        if state.server[n] or layout.crossings[n].remainder in ("split", "server"):
            *_, mark = jax.tree.leaves(state.server[n], is_leaf=is_per_device) or [None]
            if mark is None or mark.value.shape != (mark.held(workers), group.compressor.block):
                raise _other_workers(mark, workers)


def refuse_shared(state: Any, axis_name: AxisName | None, workers: int) -> None:
    """Raises a ValueError for per-device state that is the same array on several workers, where JAX tracks that."""
    if workers > 1 and _compat.tracks_varying(axis_name):
        own = [node.value for node in nodes_of(state, is_per_device) if node.kind != "replica"]
        if not all(_compat.is_varying(value, axis_name) for value in own):
            raise _shared(axis_name)


def refuse_other_rows(group: Group, rows: int, payload: Any) -> None:
    """Raises a ValueError for a payload that does not lead with the rows that were encoded: no collective could split it."""
    for leaf in jax.tree.leaves(payload):
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise _other_rows(group, rows, leaf)


def refuse_beyond_float32(tree: PyTree, but: Collection[int] = ()) -> None:
    """Raises a TypeError for leaves that a cast to float32 would change: complex numbers, and floats of more digits and range.

    Leaves whose numbers are in ``but`` pass through as they are.
    """
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        dtype = jnp.result_type(leaf)
        if i not in but and jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 4:
            raise _beyond_float32(path_name(path), dtype)


def refuse_reduced(updates: PyTree, axis_name: AxisName | None, averaged: Collection[int] = ()) -> None:
    """Raises a ValueError for a gradient that was summed over the axis already: nothing is left to compress.

    Where JAX does not track what varies over the axis, a gradient is refused if the traced equations show that it comes from a
    collective (``gradcomp_jax._origins``). Leaves whose numbers are in ``averaged`` are means on purpose.
    """
    # An empty array has nothing to reduce, and a select of empty arrays is a constant; integers have no gradient.
    named = [
        (path, leaf)
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(updates))
        if i not in averaged and jnp.size(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if _compat.tracks_varying(axis_name):
        for path, leaf in named:
            if not _compat.is_varying(leaf, axis_name):
                raise _reduced(path, axis_name)
    elif axis_name is not None and (_compat.axis_size(axis_name) or 1) > 1:
        reduced = _origins.is_reduced([leaf for _, leaf in named], axis_name)
        # A vector beside other tensors goes dense anyway, and may not be a gradient but a count or a statistic of all workers.
        for (path, leaf), is_so in zip(named, reduced, strict=True):
            if is_so and (all(reduced) or jnp.ndim(leaf) > 1):
                raise _summed(path, axis_name)


def refuse_around(
    collective: co.Collective, layout: Layout, extra: Mapping[str, Any], axis_name: AxisName | None
) -> None:
    """Raises a ValueError for an exchange that does not work with the transformations around it.

    These are a reduce-scatter inside a hierarchy, and an exchange over the axis of a worker's devices; a weight that was not
    read, a weight of another axis' workers, or one of gradients that are the workers' mean already.
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
    if context.inner_axis_name is not None and isinstance(collective, co.ReduceScatter):
        raise ValueError(
            "a reduce-scatter is for parameters that lie along the exchange's own axis; for those along the inner one give"
            " gradcomp_jax.hierarchical their param_specs"
        )


def _unbound(axis_name: AxisName | None) -> NameError:
    return NameError(
        f"the axis {axis_name!r} is not bound here: call update (and init, where state depends on the number of workers)"
        f" inside jax.shard_map, jax.pmap or jax.vmap(axis_name={axis_name!r}); in plain jax.jit wrap the chain in"
        " gradcomp_jax.unreduced(tx, mesh); or build the transformation with axis_name=None for one worker"
    )


def _other_tensors() -> ValueError:
    return ValueError(
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


def _other_dtype(memories: tuple, wanted: str) -> ValueError:
    values = jax.tree.map(lambda p: p.value, memories, is_leaf=is_per_device)
    found = {str(narrow.values_of(leaf).dtype) for leaf in jax.tree.leaves(values, is_leaf=narrow.is_narrow)}
    return ValueError(
        f"the exchange's memories are {', '.join(sorted(found))} in this state, and it keeps {wanted}: initialise it with the"
        " same dtype"
    )


def _other_workers(mark: Any, workers: int) -> ValueError:
    found = None if mark is None else mark.value.shape
    return ValueError(
        f"the owners' residual has shape {found} on this worker, which is none of {workers} workers: initialise"
        " inside the axis (gradcomp_jax.init_state and init_opt_state do), or use gradcomp_jax.resize_workers after a"
        " change of their number"
    )


def _shared(axis_name: AxisName | None) -> ValueError:
    return ValueError(
        f"the exchange's state is declared replicated over {axis_name!r}, and each worker has its own: give shard_map"
        f" gradcomp_jax.state_specs(state, axis_name={axis_name!r}) for it, not P(), in in_specs and out_specs"
        " (gradcomp_jax.init_opt_state returns state and specs)"
    )


def _other_rows(group: Group, rows: int, leaf: Any) -> ValueError:
    return ValueError(
        f"{type(group.compressor).__name__}.encode was given {rows} rows and returned {leaf.dtype}{list(leaf.shape)} in"
        " its payload: every array of a payload leads with the rows, so that a collective can split it. Return one"
        " entry for each row; what is one for the whole tensor belongs in a statistic"
    )


def _beyond_float32(name: str, dtype: Any) -> TypeError:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return TypeError(
            f"the gradient {name!r} is {dtype}, and only real ones are taken here: put"
            " optax.contrib.split_real_and_imaginary around the whole chain"
        )
    return TypeError(
        f"the leaf {name!r} is {dtype}, and what crosses and what is kept is float32: cast gradients first,"
        ' by jax.tree.map(lambda g: g.astype("float32"), gradient) or, as a link before this one,'
        ' optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype("float32"), g)), and parameters where'
        " replicas are compared; or keep the leaf out with optax.multi_transform and gradcomp_jax.set_to_zero()"
    )


def _reduced(path: tuple, axis_name: AxisName | None) -> ValueError:
    return ValueError(
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


def _summed(path: tuple, axis_name: AxisName) -> ValueError:
    return ValueError(
        listed(
            f"the gradient {path_name(path)!r} is already reduced over {axis_name!r}, and nothing is left to compress",
            "a pmean, psum or all_gather before the exchange has sent it densely: leave that out, because the exchange"
            " takes each worker's own gradient and returns the mean",
            "a function that reduces by itself, such as one that takes pmap_axis_name, is given None for the name",
            "after another exchange, one is enough",
        )
    )
