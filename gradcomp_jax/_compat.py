"""The only file that depends on JAX internals: how JAX tracks mapped axes, and the store that its processes share.

Everything that differs between ``shard_map`` (with and without varying-ness tracking), ``pmap``,
``vmap`` and no axis at all is decided here, so that the rest of the library has one code path.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config, core, distributed
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

from gradcomp_jax._typing import Array, AxisName, PyTree


def names_of(axis_name: AxisName) -> tuple[Any, ...]:
    """Returns an axis as a tuple of names."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def axis_size(axis_name: AxisName | None) -> int | None:
    """Returns the number of workers on an axis; 1 for no axis, ``None`` if the axis is not bound."""
    if axis_name is None:
        return 1
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        return None


def is_auto(axis_name: str) -> bool:
    """Returns whether an axis of the mesh is not mapped here: its sharding is in the types, or left to the compiler."""
    return axis_size(axis_name) is None and axis_name in jax.sharding.get_abstract_mesh().axis_names


def axis_index(axis_name: AxisName | None) -> Array:
    """Returns this worker's index (int32) on the axis; 0 for no axis."""
    if axis_name is None:
        return jnp.zeros((), jnp.int32)
    return lax.axis_index(axis_name)


def varying_names(x: Array) -> frozenset[Any]:
    """Returns the names of all axes along which ``x`` is recorded to differ."""
    return _names_in(jax.typeof(x))


def _names_in(aval: Any) -> frozenset[Any]:
    manual = getattr(aval, "manual_axis_type", None)
    found = manual.varying if manual is not None else getattr(aval, "vma", frozenset())
    return frozenset(found)


def shape_like(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns a shape for an array that differs along the axes that ``x`` differs along."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    known = {"vma": _names_in(aval)} if manual is None else {"manual_axis_type": manual}
    return jax.ShapeDtypeStruct(shape, dtype, **known)


def tracks_varying(axis_name: AxisName | None) -> bool:
    """Returns whether the surrounding trace records which values differ along the axis.

    True inside ``jax.shard_map`` with ``check_vma=True``; false under ``check_vma=False``, ``pmap``,
    ``vmap``, where the axis is not bound, and for no axis.
    """
    if axis_name is None or axis_size(axis_name) is None:
        return False
    return bool(varying_names(axis_index(axis_name)))


def is_varying(x: Array, axis_name: AxisName) -> bool:
    """Returns whether ``x`` is recorded to differ along every name of the axis."""
    return set(names_of(axis_name)) <= varying_names(x)


def varying_along(x: Array, axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the names of the axis along which ``x`` is recorded to differ."""
    return tuple(name for name in names_of(axis_name) if name in varying_names(x))


def untracked() -> contextlib.AbstractContextManager[Any]:
    """Traces the code inside the context as ``jax.shard_map`` with ``check_vma=False`` would."""
    return config._check_vma(False)


def traced_so_far() -> Callable[[], None]:
    """Returns a function that removes from the current trace what is traced from now on, if the trace keeps a list."""
    frame = getattr(core.trace_ctx.trace, "frame", None)
    equations = getattr(frame, "tracing_eqns", None)
    if not isinstance(equations, list):
        return lambda: None
    length = len(equations)

    def forget() -> None:
        del equations[length:]

    return forget


def is_unreduced(x: Array, axis_name: AxisName) -> bool:
    """Returns whether the type of ``x``, outside of the axis, says that its parts along the axis are not yet added up."""
    spec = getattr(jax.typeof(x).sharding, "spec", None)
    return set(names_of(axis_name)) <= set(getattr(spec, "unreduced", ()))


def is_deleted(x: Array) -> bool:
    """Returns whether an array was donated and its memory is gone; false for traced arrays."""
    return not is_traced(x) and x.is_deleted()


def is_uncommitted(x: Array) -> bool:
    """Returns whether an array is bound to no device, so that a program on any devices accepts it."""
    return not is_traced(x) and not x.committed


def is_traced(x: Any) -> bool:
    """Returns whether a value belongs to a program that is being traced, and so has no numbers yet."""
    return isinstance(x, jax.core.Tracer)


def pinned_to(x: Any) -> Any:
    """Returns the sharding that the operation that made a traced value gave it; ``None`` if it gave none."""
    made: Any = getattr(x, "parent", None)
    kind, params = getattr(getattr(made, "primitive", None), "name", ""), getattr(made, "params", {})
    if kind == "sharding_constraint":
        return None if 0 in params.get("unconstrained_dims", ()) else params["sharding"]
    if kind == "device_put":
        # One operation places all arrays of a tree.
        found = [place for var, place in zip(made.outvars, params["devices"], strict=True) if var is x.val]
        return found[0] if found and isinstance(found[0], jax.sharding.Sharding) else None
    return None


def varying(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """Marks every leaf as differing along the axis if that is tracked; otherwise does nothing."""
    if not tracks_varying(axis_name):
        return tree

    def cast(x: Array) -> Array:
        missing = tuple(n for n in names_of(axis_name) if n not in varying_names(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def _cast(name: str, typed: Callable[[Any, tuple[Any, ...]], Any]) -> Primitive:
    """Makes a primitive that changes the type of a value and adds no instruction."""
    cast = Primitive(name)
    cast.def_impl(lambda x, *, axes: x)
    cast.def_abstract_eval(lambda aval, *, axes: typed(aval, axes))
    mlir.register_lowering(cast, lambda _, x, *, axes: [x])
    return cast


def _without_names(aval: Any, axes: tuple[Any, ...]) -> Any:
    manual = getattr(aval, "manual_axis_type", None)
    if manual is None:
        return aval.update(vma=aval.vma - frozenset(axes))
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - frozenset(axes)))


def _invarying_batched(axis_data: Any, xs: Any, dims: Any, *, axes: tuple[Any, ...]) -> tuple[Any, Any]:
    """Batches the cast: under ``vmap`` over the axis itself, a value equal on all workers is one that is not mapped."""
    (x,), (dim,) = xs, dims
    if axis_data.name in axes and dim is not None:
        x, dim = lax.index_in_dim(x, 0, dim, keepdims=False), None
    rest = tuple(name for name in axes if name != axis_data.name)
    return (_invarying_p.bind(x, axes=rest) if rest else x), dim


# lax.pcast goes from invarying to varying only, and the collectives that return replicated values move
# bytes. So the cast back is a primitive of our own, which changes the type and adds no instruction.
_invarying_p = _cast("gradcomp_invarying", _without_names)
batching.fancy_primitive_batchers[_invarying_p] = _invarying_batched
# One value on all workers came from N equal ones, so its cotangent is divided among them.
ad.deflinear2(_invarying_p, lambda cotangent, _, *, axes: (varying(cotangent, axes) / lax.axis_size(axes),))


def invarying(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """Declares every leaf equal on all workers of the axis.

    Nothing is sent and nothing is checked: the caller promises that the values are equal by construction although
    the tracking cannot know it, such as what a ring of ``ppermute`` has summed. If the promise does not hold, the
    shards of the result differ although its type says that it is replicated.

    Args:
        tree: arrays of any shape and dtype, equal on every worker.
        axis_name: the axis, a tuple of names, or ``None``. Names that a leaf does not vary over are ignored.

    Returns:
        The same values; inside ``jax.shard_map`` with ``check_vma=True`` they may leave with ``out_specs=P()``, inside
        ``jax.vmap(axis_name=...)`` with ``out_axes=None``. Elsewhere nothing changes.
    """
    if axis_name is None or axis_size(axis_name) is None:
        return tree
    tracked = tracks_varying(axis_name)

    def cast(x: Array) -> Array:
        # A Python number or NumPy array never varies and has no tracked type to change.
        names = tuple(n for n in names_of(axis_name) if n in varying_names(x)) if tracked else names_of(axis_name)
        return _invarying_p.bind(x, axes=names) if names else x

    return jax.tree.map(cast, tree)


def _mapped_batched(axis_data: Any, xs: Any, dims: Any, *, axes: tuple[Any, ...]) -> tuple[Any, Any]:
    (x,), (dim,) = xs, dims
    if axis_data.name in axes and dim is None:
        x, dim = jnp.broadcast_to(x, (axis_data.size, *x.shape)), 0
    return _mapped_p.bind(x, axes=axes), dim


_mapped_p = _cast("gradcomp_mapped", lambda aval, axes: aval)
batching.fancy_primitive_batchers[_mapped_p] = _mapped_batched
ad.deflinear2(_mapped_p, lambda cotangent, _, *, axes: (cotangent,))


def mapped(x: Array, axis_name: AxisName) -> Array:
    """Returns a value for each worker in ``jax.vmap`` over the axis if all share one; elsewhere nothing changes.

    ``lax.all_to_all`` gives a shared value a wrong shape there (jax 0.10.2 to 0.12.0.1).
    """
    return _mapped_p.bind(x, axes=names_of(axis_name))


def _own_part_type(aval: Any, axes: tuple[Any, ...]) -> Any:
    manual = aval.manual_axis_type
    rest = manual.unreduced - frozenset(axes)
    kind = {"unreduced_kind": None} if not rest and hasattr(manual, "unreduced_kind") else {}
    return aval.update(manual_axis_type=manual.update(unreduced=rest, varying=manual.varying | frozenset(axes), **kind))


# lax.pcast does not go from unreduced to varying; this cast takes a worker's part as its own value, and nothing moves.
_own_part_p = _cast("gradcomp_own_part", _own_part_type)


def own_part(x: Array, axis_name: AxisName) -> Array:
    """Returns a worker's own part of a sum along the axis, inside a ``shard_map`` with ``unreduced`` in ``in_specs``."""
    return _own_part_p.bind(x, axes=names_of(axis_name))


def zeros_of(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns zeros with the shapes, dtypes and tracked types of ``function(*operands)``, which is not run."""
    traced, out_shape = jax.make_jaxpr(function, return_shape=True)(*operands)

    def zero(aval: Any) -> Array:
        wanted = tuple(_names_in(aval))
        value = jnp.zeros(aval.shape, aval.dtype)
        return lax.pcast(value, wanted, to="varying") if wanted else value

    return jax.tree.unflatten(jax.tree.structure(out_shape), [zero(a) for a in traced.out_avals])


def local_shapes(start: Callable[..., PyTree], *args: PyTree, in_specs: Any, **mapping: Any) -> PyTree:
    """Returns the shapes and dtypes that ``start`` returns on one device inside ``jax.shard_map``, with its marks.

    They may depend on the size of an axis. ``mapping`` has the mesh and axis names.
    """
    found: list[PyTree] = []

    def probe(*args: PyTree) -> Array:
        found.append(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), start(*args)))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(probe, in_specs=in_specs, out_specs=jax.sharding.PartitionSpec(), **mapping), *args)
    return found[0]


def as_cotangent(x: Array, primal: Array) -> Array:
    """Gives a cotangent the tracked type of its primal, as ``jax.grad`` would; otherwise does nothing.

    Over an axis along which only the cotangent varies, the workers' cotangents are added up. Over an axis along
    which only the primal varies, the cotangent is marked varying.
    """
    has, wants = varying_names(x), varying_names(primal)
    extra, missing = tuple(has - wants), tuple(wants - has)
    x = lax.psum(x, extra) if extra else x
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: Array, axis_name: AxisName | None) -> Array:
    """Stacks every worker's ``x`` on a new leading axis; the result is known to be replicated."""
    if axis_name is None:
        return x[None]
    if tracks_varying(axis_name):
        return lax.all_gather(varying(x, axis_name), axis_name, to="invarying")
    return lax.all_gather(x, axis_name)


def is_one_manual_axis(axis_name: AxisName) -> bool:
    """Returns whether the name is one axis of a mesh, bound by ``shard_map`` or ``pmap``, where devices can be grouped."""
    names = names_of(axis_name)
    return len(names) == 1 and names[0] in jax.sharding.get_abstract_mesh().manual_axes


def is_mapped(x: Any, axis_name: AxisName) -> bool | None:
    """Returns whether ``x`` has a value for each worker, in ``jax.vmap`` over the axis.

    ``None`` without such a ``vmap``, and for a value of a program in it.
    """
    names, trace, inside = set(names_of(axis_name)), core.trace_ctx.trace, list[Any]()
    while trace is not None and getattr(getattr(trace, "axis_data", None), "name", None) not in names:
        inside.append(trace)
        trace = getattr(trace, "parent_trace", None)
    if trace is None:
        return None
    while hasattr(x, "batch_dim"):
        if x.batch_dim is not None and getattr(x._trace.axis_data, "name", None) in names:
            return True
        x = x.val
    # Other wrappers of a value, such as a derivative, do not show what they wrap.
    hidden = is_traced(x) and (not hasattr(x, "parent") or any(x._trace is of for of in inside))
    return None if hidden else False


def is_literal(operand: Any) -> bool:
    """Returns whether an operand of a traced program is a constant rather than a variable."""
    return isinstance(operand, Literal)


def key_value_store() -> tuple[Any, int, int] | None:
    """Returns the store that all processes share, this process's index and their number; ``None`` for one process.

    The store is the client of JAX's coordination service, which works before there are devices. Devices are not used here.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes < 2:
        return None
    return state.client, state.process_id, state.num_processes
