"""Digests of arrays: a few bytes that differ, almost surely, where a bit differs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.kernels.random import mix


def digest(tree: PyTree) -> dict[str, str]:
    """Returns a digest of what this process holds of every array of a tree, by the path of the array.

    A digest depends on dtype, shape, every bit and its position. It is computed where the array lies. Two arrays that differ
    have the same digest with probability 2**-32.

    Args:
      tree: arrays of any shape and dtype. For an array on several devices, the digest is of its first shard in this process,
        which is the whole array if it is replicated.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    local = [leaf.addressable_data(0) if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for _, leaf in leaves]
    return {
        f"{jax.tree_util.keystr(path)} ({leaf.dtype}{list(leaf.shape)})": f"{int(number):08x}"
        for (path, _), leaf, number in zip(leaves, local, _numbers(local), strict=True)
    }


@jax.jit
def _numbers(leaves: Sequence[Array]) -> list[Array]:
    return [number(leaf) for leaf in leaves]


def number(x: Array) -> Array:
    """Returns the digest of an array, uint32: the sum of its hashed entries, each mixed with its position.

    ``mix`` is a bijection, so a single entry that differs always changes the sum.
    """
    words = _words(x)
    total = jnp.zeros((), jnp.uint32)
    for part in words:
        if part.size:
            position = lax.iota(jnp.uint32, part.size)
            total = mix(total ^ jnp.uint32(0x9E3779B9)) + jnp.sum(mix(part ^ mix(position + 1)), dtype=jnp.uint32)
    return total


def _words(x: Array) -> list[Array]:
    """Returns the bits of an array, as flat uint32 arrays."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(jnp.real(x)), *_words(jnp.imag(x))]
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits < 8:  # Narrow types are widened, which keeps their values.
        x = x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)
        bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits == 64:
        halves = lax.bitcast_convert_type(x, jnp.uint32)
        return [halves[..., 0].reshape(-1), halves[..., 1].reshape(-1)]
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return [lax.bitcast_convert_type(x, unsigned).reshape(-1).astype(jnp.uint32)]
