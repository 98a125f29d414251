"""Plain numbers: float32 as it is, or rounded to bfloat16."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from gradcomp_jax import _arguments, kernels
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.compressors.base import Compressor, RowInfo


class DensePayload(NamedTuple):
    """Holds values ``[rows, 1]`` in the compressor's dtype; decoding is a cast."""

    values: Array


@dataclasses.dataclass(frozen=True)
class Dense(Compressor):
    """Implements :func:`dense`."""

    dtype: Any
    by_entry = True
    summable = True  # a sum of casts is a cast of a sum, up to the dtype's rounding

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        """Returns whether values cross as float32."""
        return jnp.dtype(self.dtype) == jnp.float32

    def encode(self, rows: Array, state: PyTree, info: RowInfo) -> tuple[DensePayload, PyTree]:
        """Casts to the dtype, to the nearest value."""
        return DensePayload(rows.astype(self.dtype)), state

    def decode(self, payload: DensePayload, info: RowInfo = RowInfo()) -> Array:
        """Casts the values to float32."""
        return payload.values.astype(jnp.float32)

    def reduce(self, payloads: DensePayload, info: RowInfo = RowInfo()) -> Array:
        """Sums in float32; the cast fuses into the reduction."""
        return kernels.sum_of_workers(payloads.values)


@_arguments.checked
def dense(dtype: Any = jnp.float32) -> Dense:
    """Compresses nothing, or casts to bfloat16 (8 bits of mantissa; the baseline that every method has to beat).

    Raises:
        ValueError: for a dtype that is neither float32 nor bfloat16.
    """
    resolved = jnp.dtype(dtype)
    if resolved not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype must be float32 or bfloat16, got {resolved.name}")
    return Dense(1, resolved)  # rows of one entry need no padding, except to the number of workers
