"""Which leaves go together through which compressor: decided from shapes alone, so that every worker agrees."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from gradcomp_jax import kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.collectives import Route
from gradcomp_jax.collectives.routes import check
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.memory import Memory

Select = Callable[[str, jax.ShapeDtypeStruct], bool]
"""``select(path, leaf)``: whether a leaf is compressed. ``path`` reads like ``"dense/kernel"``."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A compressor with its memory and route, and what it is responsible for.

    Attributes:
        compressor: encodes rows.
        memory: what stays behind.
        route: how payloads cross.
    """

    compressor: Compressor
    memory: Memory
    route: Route

    def __post_init__(self) -> None:
        """Refuses combinations that cannot keep the laws."""
        check(self.route, self.compressor, self.memory)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One vector to compress: a single leaf, or several leaves joined end to end."""

    leaves: tuple[int, ...]
    size: int

    def join(self, leaves: Mapping[int, Array], block: int) -> Array:
        """Float32 rows of the joined leaves, given by their number in the tree."""
        if len(self.leaves) == 1:
            return kernels.as_rows(leaves[self.leaves[0]], block)
        flat = [leaves[i].reshape(-1).astype(jnp.float32) for i in self.leaves]
        return kernels.as_rows(jnp.concatenate(flat), block)

    def split(self, rows: Array, like: Sequence[Array]) -> dict[int, Array]:
        """Inverse of :meth:`join`: leaf index to an array of that leaf's shape and dtype."""
        if len(self.leaves) == 1:
            i = self.leaves[0]
            return {i: kernels.from_rows(rows, like[i].shape, like[i].dtype)}
        flat, start, result = rows.reshape(-1), 0, {}
        for i in self.leaves:
            part = jax.lax.slice(flat, (start,), (start + like[i].size,))
            result[i] = part.reshape(like[i].shape).astype(like[i].dtype)
            start += like[i].size
        return result


def gains(compressor: Compressor, dense: Compressor) -> Select:
    """The default rule: two or more dimensions, and a payload smaller than the dense one."""

    def select(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
        del path
        if len(leaf.shape) < 2:
            return False
        rows = kernels.row_count(leaf.size, compressor.block)
        dense_rows = kernels.row_count(leaf.size, dense.block)
        return rows * compressor.payload_bytes(1) < dense_rows * dense.payload_bytes(1)

    return select


def everything(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Compresses every leaf."""
    del path, leaf
    return True


def path_name(path: tuple) -> str:
    """A tree path as text: ``"dense/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def pieces(tree: PyTree, select: Select) -> tuple[list[Piece], list[Piece]]:
    """Cuts a tree into the pieces that are compressed, one a leaf, and the joined piece that goes dense.

    Leaves without entries are in neither.

    Raises:
        TypeError: for a leaf that is not a real floating-point array.
    """
    chosen: list[Piece] = []
    rest: list[int] = []
    size = 0
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"the leaf {path_name(path)!r} has dtype {jnp.result_type(leaf)}; only real floating-point gradients "
                "are"
                " exchanged; leave other leaves out with optax.masked"
            )
        spec = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        if spec.size == 0:
            continue
        if select(path_name(path), spec):
            chosen.append(Piece((i,), spec.size))
        else:
            rest.append(i)
            size += spec.size
    return chosen, [Piece(tuple(rest), size)] if rest else []
