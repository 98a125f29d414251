"""Counters that go on for ever."""

import jax.numpy as jnp

from gradcomp_jax._typing import Array

NEAR_THE_END = 2**31 - 2**24
"""Far enough from int32's largest number for a period to be added; of what is above it the successor is about 2**30."""


def count_on(counter: Array, *, cycle: int = 1) -> Array:
    """Returns the number after a counter's: one more, or, near the end of int32, about 2**30 less.

    What has long begun (a warm-up, a delay) is not begun anew, no number is below zero, and what happens every so many steps
    goes on as it did.

    Args:
        counter: int32, of any shape.
        cycle: steps after which everything that follows the counter repeats itself.
    """
    back = 2**30 // cycle * cycle
    return jnp.where(counter >= NEAR_THE_END, counter - (back - 1), counter + 1)
