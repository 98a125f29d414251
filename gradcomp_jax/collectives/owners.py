"""Which worker owns which rows, where each reduces those that it owns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array


@dataclasses.dataclass(frozen=True)
class Owners:
    """The owners of a message's rows.

    Attributes:
        rows: of the message.
        workers: N, each an owner.
        in_turn: whether row r belongs to worker r modulo N; otherwise each owns as many that follow one another.
    """

    rows: int
    workers: int
    in_turn: bool

    @property
    def each(self) -> int:
        """Rows that a worker owns, the last ones of padding."""
        return -(-self.rows // self.workers)

    def by_owner(self, tree: Any) -> Any:
        """Returns rows ``[rows, ...]`` as ``[N, each, ...]``: slice i is what worker i owns."""

        def split(a: Array) -> Array:
            total = self.each * self.workers
            padded = jnp.pad(a, [(0, total - a.shape[0])] + [(0, 0)] * (a.ndim - 1)) if total != a.shape[0] else a
            if not self.in_turn:
                return padded.reshape(self.workers, self.each, *a.shape[1:])
            return jnp.swapaxes(padded.reshape(self.each, self.workers, *a.shape[1:]), 0, 1)

        return jax.tree.map(split, tree)

    def by_row(self, tree: Any) -> Any:
        """Inverse of :meth:`by_owner`, but for the padding."""
        return jax.tree.map(lambda a: (jnp.swapaxes(a, 0, 1) if self.in_turn else a).reshape(-1, *a.shape[2:]), tree)

    def mine(self, tree: Any, index: Array) -> Any:
        """Returns the rows that worker ``index`` owns, of all rows."""
        # By the owner's number: that of its first row may be more than an index holds.
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(self.by_owner(a), index, keepdims=False), tree)

    def place(self, tree: Any, index: Array) -> Any:
        """Returns the rows that worker ``index`` owns among zeros for all others; only where those follow one another."""

        def among_zeros(a: Array) -> Array:
            rows, *rest = a.shape
            if rows * self.workers < 2**31:
                # In place: with a dimension of owners, TPU's tiles would be filled up and every row copied.
                zeros = jnp.zeros((rows * self.workers, *rest), a.dtype)
                return lax.dynamic_update_slice_in_dim(zeros, a, index * rows, 0)
            # The number of a row is more than an index holds, an owner's is not.
            zeros = jnp.zeros((self.workers, *a.shape), a.dtype)
            return lax.dynamic_update_index_in_dim(zeros, a, index, 0).reshape(-1, *rest)

        return jax.tree.map(among_zeros, tree)
