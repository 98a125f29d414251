"""Counters that never overflow."""

import jax.numpy as jnp

from gradcomp_jax._typing import Array

NEAR_THE_END = 2**31 - 2**24
"""Far enough from int32's largest number for a period to be added. A counter above it continues from about 2**30."""


def count_on(counter: Array, *, cycle: int = 1) -> Array:
    """Returns the number after a counter's: one more, or, near the end of int32, about 2**30 less.

    A warm-up or a delay that is over does not start again, no number is below zero, and what happens every so many steps
    continues as before.

    Args:
        counter: int32, of any shape.
        cycle: steps after which everything that depends on the counter repeats itself.
    """
    back = 2**30 // cycle * cycle
    return jnp.where(counter >= NEAR_THE_END, counter - (back - 1), counter + 1)
