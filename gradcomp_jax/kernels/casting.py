"""Numbers as unsigned words of the same width, so that a collective moves them as they are.

Some backends widen bfloat16 or int8 inside a collective, which doubles the bytes; an unsigned word is data
and crosses untouched.
"""

import jax.numpy as jnp
from jax import lax

from gradcomp_jax._typing import Array

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def to_words(x: Array) -> Array:
    """Reinterprets 8, 16 or 32-bit numbers as unsigned integers of that width."""
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])


def from_words(words: Array, dtype: jnp.dtype) -> Array:
    """Inverse of :func:`to_words`."""
    return words if words.dtype == dtype else lax.bitcast_convert_type(words, dtype)
