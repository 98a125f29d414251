"""Where parameters lie on a mesh: what a user's partition specs say about one axis."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from gradcomp_jax import _compat
from gradcomp_jax._compat import names_of as names_of
from gradcomp_jax._typing import AxisName, PyTree


def devices_along(mesh: Mesh, axis_name: AxisName) -> int:
    """Returns how many devices of a mesh lie along one or several axes."""
    return math.prod(mesh.shape[name] for name in names_of(axis_name))


def mapped(
    function: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName,
    in_specs: Any,
    out_specs: Any,
    *,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Maps a function over the devices along one or several axes; others are left to the compiler."""
    names = set(names_of(axis_name))
    how: dict[str, Any] = {"mesh": mesh, "axis_names": names, "check_vma": check_vma}
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **how)


def vmapped(
    function: Callable[..., Any], mesh: Mesh, axis_name: AxisName, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Maps a function as :func:`mapped` does, by ``vmap``: each worker is a lane, and the compiler has all axes of the mesh."""
    workers = devices_along(mesh, axis_name)

    def pinned(x: Any) -> Any:
        # Other dimensions lie where the compiler, or a constraint in the function, has them.
        spec = PartitionSpec(axis_name, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def split(x: Any) -> Any:
        if x.shape[0] % workers:
            raise ValueError(
                f"the {workers} workers along {axis_name!r} do not divide a batch of {x.shape[0]} examples"
            )
        return pinned(x.reshape(workers, -1, *x.shape[1:]))

    def joined(x: Any) -> Any:
        return pinned(x.reshape(-1, *x.shape[2:]))

    def where_split(change: Callable[[Any], Any], specs: Any, tree: Any) -> Any:
        return jax.tree.map(
            lambda spec, part: jax.tree.map(change, part) if any(spec) else part, specs, tree, is_leaf=_is_spec
        )

    def call(*args: Any) -> Any:
        in_axes, out_axes = (
            jax.tree.map(lambda spec: 0 if any(spec) else None, specs, is_leaf=_is_spec)
            for specs in (in_specs, out_specs)
        )
        how: dict[str, Any] = {"axis_name": axis_name, "spmd_axis_name": axis_name, "axis_size": workers}
        lanes = jax.vmap(function, in_axes=in_axes, out_axes=out_axes, **how)
        return where_split(joined, out_specs, lanes(*where_split(split, in_specs, args)))

    return jax.jit(call, inline=True)


def by_leaf(specs: PyTree, tree: PyTree) -> list[PartitionSpec]:
    """Returns the spec of every leaf of ``tree``; ``specs`` may be a prefix of it, and ``None`` stands for ``P()``.

    A ``NamedSharding`` stands for its spec. Either tree may wrap its leaves, as those of ``flax.nnx`` do.
    """

    def spread(spec: Any, part: PyTree) -> PyTree:
        if not _is_spec(spec):
            raise TypeError(f"{spec!r} is no PartitionSpec, such as PartitionSpec('data') or PartitionSpec()")
        return jax.tree.map(lambda _: _spec_of(spec), part)

    try:
        full = jax.tree.map(spread, specs, tree, is_leaf=_is_spec)
    except (ValueError, TypeError) as error:
        if found := _by_path(specs, tree):
            return found
        raise ValueError(
            "param_specs must be a tree of jax.sharding.PartitionSpec with the structure of the parameters, or a prefix"
            f" of it: {error}"
        ) from error
    # A None in the tree itself, as Equinox and optax.masked make them, is not a leaf.
    return jax.tree.leaves(full, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _by_path(specs: PyTree, tree: PyTree) -> list[PartitionSpec]:
    """Returns :func:`by_leaf` for trees of other nodes with the same names; empty if they differ."""
    given = {_names(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)}
    paths = [_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    prefixes = [next((path[:n] for n in range(len(path) + 1) if path[:n] in given), None) for path in paths]
    if set(prefixes) != set(given) or not all(map(_is_spec, given.values())):
        return []
    return [_spec_of(given[prefix]) for prefix in prefixes if prefix is not None]


def _names(path: tuple) -> tuple[str, ...]:
    """Returns a path without the attribute by which a box, such as a variable of ``flax.nnx``, holds its value."""
    boxed = path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in (path[:-1] if boxed else path))


def lying(tree: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree | None:
    """Returns the specs by which arrays lie along the Auto axes of a mesh other than ``axis_name``; ``None`` if along none.

    Of a traced array only the constraint that made it is known.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    others = tuple(name for name in types if name not in names_of(axis_name) and types[name] == AxisType.Auto)

    def spec(x: Any) -> PartitionSpec:
        place = _compat.pinned_to(x) if _compat.is_traced(x) else getattr(x, "sharding", None)
        if isinstance(place, NamedSharding) and place.mesh.shape == mesh.shape:
            return only(place.spec, others)
        return PartitionSpec()

    found = jax.tree.map(spec, tree)
    return found if any(map(any, jax.tree.leaves(found))) else None


def like(specs: PyTree, tree: PyTree) -> PyTree:
    """Returns :func:`by_leaf` in the structure of ``tree``."""
    return jax.tree.unflatten(jax.tree.structure(tree), by_leaf(specs, tree))


def sharded_dim(spec: PartitionSpec, axis_name: AxisName) -> int | None:
    """Returns the dimension that lies along the axis, or ``None``."""
    for dim, entry in enumerate(spec):
        if names_of(entry) == names_of(axis_name):
            return dim
        if set(names_of(axis_name)) & set(names_of(entry)):
            raise ValueError(
                f"the spec {spec} lays one dimension along {entry}, of which {axis_name!r} is a part; shard each dimension"
                " along one axis"
            )
    return None


def only(spec: PartitionSpec, axes: tuple[Any, ...]) -> PartitionSpec:
    """Returns a spec without the axes that are left to the compiler."""

    def keep(entry: Any) -> Any:
        kept = tuple(name for name in names_of(entry) if name in axes)
        return kept if len(kept) > 1 else (kept[0] if kept else None)

    return PartitionSpec(*(keep(entry) for entry in spec))


def _is_spec(node: Any) -> bool:
    known = isinstance(node, (PartitionSpec, NamedSharding))
    return node is None or known or (isinstance(node, Sharding) and node.is_fully_replicated)


def _spec_of(node: Any) -> PartitionSpec:
    return node if isinstance(node, PartitionSpec) else getattr(node, "spec", PartitionSpec())


def path_name(path: tuple) -> str:
    """Returns a tree path as text: ``"dense/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
