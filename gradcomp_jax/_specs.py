"""Where parameters lie on a mesh: what a user's partition specs say about one axis."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

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


def by_leaf(specs: PyTree, tree: PyTree) -> list[PartitionSpec]:
    """Returns the spec of every leaf of ``tree``; ``specs`` may be a prefix of it, and ``None`` stands for ``P()``."""

    def spread(spec: PartitionSpec | None, part: PyTree) -> PyTree:
        if not _is_spec(spec):
            raise TypeError(f"{spec!r} is no PartitionSpec, such as PartitionSpec('data') or PartitionSpec()")
        return jax.tree.map(lambda _: PartitionSpec() if spec is None else spec, part)

    try:
        full = jax.tree.map(spread, specs, tree, is_leaf=_is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "param_specs must be a tree of jax.sharding.PartitionSpec with the structure of the parameters, or a prefix"
            f" of it: {error}"
        ) from error
    # A None in the tree itself, as Equinox and optax.masked make them, is not a leaf.
    return jax.tree.leaves(full, is_leaf=lambda node: isinstance(node, PartitionSpec))


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
    return node is None or isinstance(node, PartitionSpec)


def path_name(path: tuple) -> str:
    """Returns a tree path as text: ``"dense/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
