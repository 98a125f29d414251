"""Random numbers for stochastic rounding.

The fast generator is a counter-based hash: the number at position ``i`` depends only on ``i`` and the key,
so it fuses into the kernel that uses it and does not depend on how the array is sharded. threefry, JAX's
own generator, is several times slower and remains selectable.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax._typing import Array

Generator = Literal["hash", "threefry"]
GENERATORS: tuple[Generator, ...] = ("hash", "threefry")

_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio, because zero is a fixed point of mix


def mix(x: Array) -> Array:
    """Returns a bijection of uint32 with low bias (two-multiply xor-shift of Wellons, hash-prospector)."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def hash_bits(key: Array, shape: tuple[int, ...], *, first: Array | int = 0, stride: int | None = None) -> Array:
    """Draws uniform uint32 ``shape`` from a key, by hashing each entry's position.

    Args:
        key: a typed JAX key (scalar).
        shape: ``(rows, width)``.
        first: position of the first entry in the whole tensor, if these rows are a part of it.
        stride: positions from one row to the next, if these are columns of longer rows; ``width`` by default.
    """
    start, lap = _starts(shape, shape[1] if stride is None else stride)
    position = start + jax.lax.broadcasted_iota(jnp.uint32, shape, 1) + jnp.asarray(first).astype(jnp.uint32)
    return _hash(key, position, lap)


def _starts(shape: tuple[int, ...], stride: int) -> tuple[Array, Array | None]:
    """Returns where each row begins, and how often 32-bit positions have wrapped before it, or ``None`` if they never do."""
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    most = 2**32 // max(stride, 1)
    if shape[0] <= most:
        return row * jnp.uint32(stride), None
    return row % jnp.uint32(most) * jnp.uint32(stride), row // jnp.uint32(most)


def _hash(key: Array, position: Array, lap: Array | None) -> Array:
    words = jax.random.key_data(key).reshape(-1).astype(jnp.uint32)
    # Two rounds with a key word before each: after only one round, keys that differ in a word have streams that are
    # permutations of each other. The second word includes the first for the same reason.
    second = words[-1] ^ mix(words[0])
    if lap is not None:
        second = mix(second ^ mix(lap + jnp.uint32(_GOLDEN)))
    return mix(mix(position ^ words[0]) + second)


def row_seeds(key: Array, rows: int) -> Array:
    """Returns a seed for each row, for all who draw for that row alone: uint32 ``[rows]``.

    Among the seeds of a hundred thousand rows, about one pair is equal by chance.
    """
    return hash_bits(key, (1, rows))[0]


def seeded_bits(seeds: Array, width: int) -> Array:
    """Draws uniform bits of each row from its seed and the column alone: some of the rows draw what all of them would.

    Args:
        seeds: uint32 ``[rows]``.
        width: columns.

    Returns:
        uint32 ``[rows, width]``.
    """
    seed = seeds[:, None]
    column = jax.lax.broadcasted_iota(jnp.uint32, (seeds.shape[0], width), 1)
    # As in _hash, the seed goes before each round: otherwise related seeds would draw permutations of each other's bits.
    return mix(mix(column ^ seed) + mix(seed + jnp.uint32(_GOLDEN)))


def fold_seeds(seeds: Array, number: Array | int) -> Array:
    """Returns other seeds for each number, such as a worker's index; different seeds stay different.

    Args:
        seeds: uint32 ``[rows]``.
        number: integer scalar, possibly traced.

    Returns:
        uint32 ``[rows]``.
    """
    folded = mix(jnp.asarray(number).astype(jnp.uint32) + jnp.uint32(_GOLDEN))
    return mix(mix(seeds ^ folded) + mix(folded ^ jnp.uint32(_GOLDEN)))


def uniform(key: Array, shape: tuple[int, ...], generator: Generator = "hash") -> Array:
    """Draws uniform float32 in [0, 1) with 24 random bits, shape ``(rows, width)``; see :func:`hash_bits`."""
    if generator == "threefry":
        return jax.random.uniform(key, shape, jnp.float32)
    return _fraction(hash_bits(key, shape))


def rounded(scaled: Array, drawn: Array | None) -> Array:
    """Returns the nearest integers, ties to even; with numbers drawn from [0, 1), unbiased."""
    if drawn is None:
        return jnp.round(scaled)
    # A comparison, not floor(scaled + u): that sum rounds, and would sometimes move a value that is on the grid.
    low = jnp.floor(scaled)
    return low + (drawn < scaled - low).astype(jnp.float32)


def uniform_planes(key: Array, rows: int, block: int, starts: list[int], width: int) -> list[Array]:
    """Draws uniform float32 ``(rows, width)`` in [0, 1) for each plane of a row, one hash for every two planes.

    The second of a pair reads the bits of the first rotated by 16. Each number has 24 random bits. In a pair, the upper 16 bits
    of the two numbers are independent, and the lower 8 repeat the other's upper 8. That correlates them by 2**-15, far
    below what ten million draws show.

    Args:
        key: a typed JAX key (scalar).
        rows: number of rows.
        block: entries of a row.
        starts: where in a row each plane begins.
        width: entries of a plane.
    """
    drawn: list[Array] = []
    for start in starts[::2]:
        bits = hash_bits(key, (rows, width), first=start, stride=block)
        drawn += [_fraction(bits), _fraction(_turned(bits))]
    return drawn[: len(starts)]


def uniform_of_planes(key: Array, rows: int, block: int, starts: list[int], width: int) -> Array:
    """Returns :func:`uniform_planes` in the layout of the row: float32 ``(rows, block)``, with a hash for every entry."""
    entry = np.arange(block)
    plane = entry // width
    first_of_pair = np.asarray(starts)[plane - plane % 2]
    place = (first_of_pair + entry - np.asarray(starts)[plane]).astype(np.uint32)
    start, lap = _starts((rows, block), block)
    bits = _hash(key, start + place, lap)
    return _fraction(jnp.where(plane % 2 == 1, _turned(bits), bits))


def _turned(bits: Array) -> Array:
    return (bits << 16) | (bits >> 16)


def _fraction(bits: Array) -> Array:
    """Returns the upper 24 bits as a float32 in [0, 1)."""
    # Through int32: a conversion from uint32 takes several instructions, from int32 one.
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)
