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

from gradcomp_jax.kernels.random import mix, uniform_planes
from tests.programs import kernels

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


def slow_seeded(seed: int, column: int) -> int:
    return slow_mix((slow_mix(column ^ seed) + slow_mix((seed + 0x9E3779B9) & MASK)) & MASK)


def test_seeded_bits_depend_on_seed_and_column_alone() -> None:
    seeds = np.uint32([0, 1, 2**32 - 1, 12345])
    got = np.asarray(kernels.seeded_bits(jnp.asarray(seeds), 6))
    assert got.dtype == np.uint32
    assert got.tolist() == [[slow_seeded(int(s), c) for c in range(6)] for s in seeds]
    np.testing.assert_array_equal(kernels.seeded_bits(jnp.asarray(seeds[2:]), 4), got[2:, :4])
    np.testing.assert_array_equal(jax.vmap(lambda s: kernels.seeded_bits(s[None], 6)[0])(jnp.asarray(seeds)), got)
    assert kernels.seeded_bits(jnp.zeros((0,), jnp.uint32), 6).shape == (0, 6)
    assert kernels.row_seeds(jax.random.key(0), 0).shape == (0,)


def check_independent(a: np.ndarray, b: np.ndarray) -> None:
    """Uncorrelated, nowhere the same, and in pairs evenly spread over the squares of lowest and of highest bits.

    A hundred pairs are looked at: p > 1e-6, so that all of them together have one of 1e-4.
    """
    assert abs(correlation(a, b)) < 5 / np.sqrt(a.size)
    # Chance makes about one pair in 2**32 equal.
    assert np.mean(a == b) < 1e-3
    for shift in (0, 27):
        cells = np.bincount(((a >> shift & 31) * 32 + (b >> shift & 31)).ravel().astype(int), minlength=1024)
        assert scipy.stats.chisquare(cells).pvalue > 1e-6


# Seeds in a row, some that differ in the highest bit or in all, and those that keys give.
RELATED = {"next": np.arange(4), "high": np.array([5, 5 + 2**31, 5 + 2**30, 2**32 - 6])}


@pytest.mark.parametrize("kind", ("next", "high", "drawn"))
def test_rows_of_any_seeds_draw_independently(kind: str) -> None:
    drawn = np.asarray(kernels.row_seeds(jax.random.key(1), 4)) if kind == "drawn" else RELATED[kind]
    seeds = jnp.asarray(drawn.astype(np.uint32))
    bits = np.asarray(jax.jit(kernels.seeded_bits, static_argnums=1)(seeds, 100_000))
    for a, b in itertools.combinations(bits, 2):
        check_independent(a, b)
        # A permutation of a stream has its set: of 1e5 of 2**32 numbers, two rows share two by chance.
        assert np.intersect1d(a, b).size < 20
    for row in bits:
        check_independent(row[1:], row[:-1])
        assert scipy.stats.chisquare(np.bincount(row >> 24, minlength=256)).pvalue > 1e-4


def test_folded_seeds_are_independent_for_each_number() -> None:
    seeds = kernels.row_seeds(jax.random.key(2), 100_000)
    fold = jax.jit(kernels.fold_seeds)
    several = [np.asarray(seeds), *(np.asarray(fold(seeds, jnp.int32(i))) for i in (0, 1, 2, 7, -1))]
    for a, b in itertools.combinations(several, 2):
        check_independent(a, b)
    # As a number of Python's; and folding twice depends on the order.
    np.testing.assert_array_equal(kernels.fold_seeds(seeds, 7), several[4])
    check_independent(np.asarray(fold(fold(seeds, 1), 2)), np.asarray(fold(fold(seeds, 2), 1)))
    # What a worker's seeds draw is not what the seeds draw in the column of its number.
    check_independent(several[3], np.asarray(kernels.seeded_bits(seeds, 3))[:, 2])
