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
from gradcomp_jax.kernels.random import mix, uniform_planes

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


LARGE = (10, 1_000_000)
"""1e7 draws: a mean is known to 1e-4."""


@pytest.fixture(scope="module")
def large():
    """Numbers of two workers, two leaves and two steps, keys folded as the exchange folds them."""

    @jax.jit
    def draw(worker, leaf, step):
        key = jax.random.fold_in(jax.random.key(11), worker)
        return kernels.uniform(jax.random.fold_in(jax.random.fold_in(key, leaf), step), LARGE)

    wanted = {"first": (0, 0, 0), "worker": (1, 0, 0), "leaf": (0, 1, 0), "step": (0, 0, 1)}
    return {name: np.asarray(draw(*map(jnp.int32, place))).ravel() for name, place in wanted.items()}


def test_ten_million_draws_are_uniform(large) -> None:
    drawn = large["first"]
    assert abs(drawn.mean(dtype=np.float64) - 0.5) < 5 * np.sqrt(1 / 12 / drawn.size)
    assert abs((drawn.astype(np.float64) ** 2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / drawn.size)
    for bins, part in ((1024, drawn), (256, drawn * 256 % 1)):
        counts = np.bincount((part * bins).astype(int), minlength=bins)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("other", ("worker", "leaf", "step"))
def test_workers_leaves_and_steps_draw_independently(large, other: str) -> None:
    a, b = large["first"], large[other]
    assert abs(correlation(a, b)) < 5 / np.sqrt(a.size)
    # Together they fill the square evenly, which a correlation of zero alone does not say.
    cells = np.bincount((a * 32).astype(int) * 32 + (b * 32).astype(int), minlength=1024)
    assert scipy.stats.chisquare(cells).pvalue > 1e-4


@pytest.mark.parametrize("lag", (1, 2, 3, 7, 1024, 1_000_000))
def test_neighbours_of_ten_million_draw_independently(large, lag: int) -> None:
    a, b = large["first"][:-lag], large["first"][lag:]
    assert abs(correlation(a, b)) < 5 / np.sqrt(a.size)
    cells = np.bincount((a * 32).astype(int) * 32 + (b * 32).astype(int), minlength=1024)
    assert scipy.stats.chisquare(cells).pvalue > 1e-4


def test_ten_million_roundings_are_unbiased(large) -> None:
    """Stochastic rounding takes an entry with its probability, within five standard deviations of 1e7 draws."""
    for p in (0.5, 0.1, 1e-3, 1 - 1e-3):
        taken = np.mean(large["first"] < p)
        assert abs(taken - p) < 5 * np.sqrt(p * (1 - p) / large["first"].size)


def test_planes_that_share_a_hash_draw_independently() -> None:
    planes = jax.jit(lambda key: uniform_planes(key, 2000, 5000, [0, 1000, 2000, 3000, 4000], 1000))
    drawn = [np.asarray(p).ravel() for p in planes(jax.random.key(2))]
    for a, b in itertools.combinations(drawn, 2):
        assert abs(correlation(a, b)) < 5 / np.sqrt(a.size)
        cells = np.bincount((a * 32).astype(int) * 32 + (b * 32).astype(int), minlength=1024)
        assert scipy.stats.chisquare(cells).pvalue > 1e-4
    # The pair's upper 16 bits are disjoint parts of one hash; each number alone is uniform to its last bit.
    for p in drawn:
        assert scipy.stats.chisquare(np.bincount((p * 2**24).astype(int) & 255, minlength=256)).pvalue > 1e-4


def test_draws_do_not_depend_on_how_an_array_is_sharded(mesh8) -> None:
    key = jax.random.key(5)
    rows = jax.random.normal(jax.random.key(6), (64, 640))
    one = jnp.ones(1)
    whole = jax.jit(lambda r: kernels.ternarize_packed(r, one, one, key))(rows)
    spec = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("data"))
    sharded = jax.jit(lambda r: kernels.ternarize_packed(r, one, one, key))(jax.device_put(rows, spec))
    assert len(sharded.sharding.device_set) == 8
    np.testing.assert_array_equal(whole, sharded)
