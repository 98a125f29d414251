"""The counter-based hash: exact against Python's integers, uniform, and without correlations that a sum would show.

Keys are fixed, so a test that passes once passes always. Statistical bounds are those of a fair generator: a chi-square
with p > 1e-4, correlations and means within five standard deviations.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from gradcomp_jax import kernels
from gradcomp_jax.kernels.random import mix

SHAPE = (64, 1024)
MASK = 2**32 - 1


def slow_mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def undo_mix(x: int) -> int:
    """The inverse, step by step: a xor with a shift is undone by the shifts that follow."""

    def unshift(value: int, by: int) -> int:
        result = value
        for _ in range(32 // by + 1):
            result = value ^ result >> by
        return result

    x = unshift(x, 16) * pow(0x846CA68B, -1, 2**32) & MASK
    x = unshift(x, 15) * pow(0x7FEB352D, -1, 2**32) & MASK
    return unshift(x, 16)


@pytest.fixture(scope="module")
def bits():
    hashed = jax.jit(lambda key: kernels.hash_bits(key, SHAPE))
    return lambda key: np.asarray(hashed(key))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel().astype(np.float64), b.ravel().astype(np.float64))[0, 1])


def test_mix_is_a_bijection() -> None:
    rng = np.random.default_rng(0)
    sample = np.concatenate([np.arange(500), 2**32 - 1 - np.arange(500), rng.integers(0, 2**32, 1000)]).astype(
        np.uint32
    )
    mixed = np.asarray(mix(jnp.asarray(sample)))
    assert mixed.tolist() == [slow_mix(int(x)) for x in sample]
    assert [undo_mix(int(x)) for x in mixed] == sample.tolist()


def test_hash_depends_on_key_and_position_alone() -> None:
    key = jax.random.key(7)
    words = [int(w) for w in jax.random.key_data(key)]
    got = np.asarray(kernels.hash_bits(key, (3, 5), first=11))
    for r, c in np.ndindex(3, 5):
        assert got[r, c] == slow_mix((slow_mix((11 + 5 * r + c) ^ words[0]) + words[-1]) & MASK)
    np.testing.assert_array_equal(got, kernels.hash_bits(jax.random.key(7), (3, 5), first=11))


def test_parts_of_a_tensor_draw_what_the_whole_draws() -> None:
    key = jax.random.key(3)
    whole = np.asarray(kernels.hash_bits(key, (6, 7)))
    parts = [kernels.hash_bits(key, (2, 7), first=jnp.int32(14 * i)) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    # Another row length, the same entries.
    np.testing.assert_array_equal(kernels.hash_bits(key, (1, 42))[0], whole.ravel())
    assert kernels.hash_bits(key, (0, 7)).shape == (0, 7)


@pytest.mark.parametrize("shift", (0, 12, 24))
@pytest.mark.parametrize("seed", (0, 1, 2**31))
def test_bytes_are_uniform(bits, seed: int, shift: int) -> None:
    counts = np.bincount(((bits(jax.random.key(seed)) >> shift) & 0xFF).ravel(), minlength=256)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("lag", (1, 2, 5))
def test_neighbours_are_uncorrelated(bits, axis: int, lag: int) -> None:
    drawn = np.moveaxis(bits(jax.random.key(5)), axis, 0)
    assert abs(correlation(drawn[:-lag], drawn[lag:])) < 5 / np.sqrt(drawn[lag:].size)


def test_keys_are_uncorrelated(bits) -> None:
    base = jax.random.key(0)
    keys = [base, *(jax.random.fold_in(base, i) for i in range(4)), jax.random.key(1), jax.random.key(2)]
    keys.append(jax.random.fold_in(jax.random.fold_in(base, 1), 0))
    drawn = [bits(key) for key in keys]
    for a, b in itertools.combinations(drawn, 2):
        for lag in (0, 1, 2):
            x, y = a.ravel()[lag:], b.ravel()[: a.size - lag]
            assert abs(correlation(x, y)) < 5 / np.sqrt(x.size)
            # Chance makes about one pair in 2**32 * 1/65536 equal; a shifted stream would make all.
            assert np.mean(x == y) < 1e-3


def test_seeds_next_to_each_other_do_not_shift_each_other(bits) -> None:
    # The keys of plain seeds differ in their last word alone.
    drawn = [bits(jax.random.key(seed)).ravel() for seed in (8, 9, 10)]
    for a, b in itertools.permutations(drawn, 2):
        for lag in range(4):
            x, y = a[lag:], b[: a.size - lag]
            assert abs(correlation(x, y)) < 5 / np.sqrt(x.size)


@pytest.mark.parametrize("generator", ("hash", "threefry"))
def test_uniform(generator: str) -> None:
    drawn = np.asarray(jax.jit(lambda key: kernels.uniform(key, SHAPE, generator))(jax.random.key(4)))
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    n = drawn.size
    assert abs(drawn.mean(dtype=np.float64) - 0.5) < 5 * np.sqrt(1 / 12 / n)
    assert scipy.stats.chisquare(np.bincount((drawn.ravel() * 256).astype(int), minlength=256)).pvalue > 1e-4


def test_hash_uniform_uses_the_upper_24_bits(bits) -> None:
    key = jax.random.key(4)
    np.testing.assert_array_equal(np.asarray(kernels.uniform(key, SHAPE)) * 2.0**24, bits(key) >> 8)


def test_threefry_is_jax_own() -> None:
    key = jax.random.key(4)
    np.testing.assert_array_equal(
        kernels.uniform(key, (3, 5), "threefry"), jax.random.uniform(key, (3, 5), jnp.float32)
    )
