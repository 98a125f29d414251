"""Ternarization: the clip bound against a float64 oracle, the code's values, its expectation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax.kernels import ternary
from tests.programs import kernels

BLOCK = 7
DRAWS = 8192


@functools.partial(jax.jit, static_argnames=("clip", "per_row"))
def bound_of(rows, count, *, clip, per_row):
    return kernels.clip_bound(rows, count, clip=clip, per_row=per_row)


def slow_bound(values: np.ndarray, clip: float | None) -> float:
    """min(max|g|, c sigma) in float64, the largest where sigma is 0."""
    exact = values.astype(np.float64)
    largest, sigma = np.abs(exact).max(initial=0.0), exact.std() if exact.size else 0.0
    return min(largest, clip * sigma) if clip is not None and sigma > 0 else largest


def bounds_of_vector(x: np.ndarray, *, clip: float | None, per_row: bool, block: int = BLOCK) -> np.ndarray:
    rows = kernels.as_rows(jnp.asarray(x), block)
    return np.asarray(bound_of(rows, kernels.valid_counts(x.size, block), clip=clip, per_row=per_row))


@pytest.mark.parametrize(
    ("size", "clip", "per_row"), [(1, 0.5, True), (8, None, True), (20, 0.5, False), (7, None, False)]
)
def test_bound(size: int, clip: float | None, per_row: bool) -> None:
    # An offset: sigma is not the root mean square.
    x = (np.random.default_rng(size).normal(size=size) + 1.5).astype(np.float32)
    parts = [x[i : i + BLOCK] for i in range(0, size, BLOCK)] if per_row else [x]
    expected = [slow_bound(part, clip) for part in parts]
    np.testing.assert_allclose(bounds_of_vector(x, clip=clip, per_row=per_row), expected, rtol=1e-5)


@pytest.mark.parametrize("per_row", (True, False))
@pytest.mark.parametrize("magnitude", (1e30, 1e19, 1e13, 1e-13, 1e-19, 1e-30))
def test_bound_at_any_magnitude(magnitude: float, per_row: bool) -> None:
    x = np.random.default_rng(1).normal(size=20).astype(np.float32) * np.float32(magnitude)
    parts = [x[:7], x[7:14], x[14:]] if per_row else [x]
    got = bounds_of_vector(x, clip=0.5, per_row=per_row)
    if not per_row and not 1e-15 < magnitude < 1e15:
        # One pass over a tensor squares its entries as they are: where that could go wrong nothing is clipped.
        np.testing.assert_array_equal(got, [np.abs(x).max()])
        return
    np.testing.assert_allclose(got, [slow_bound(part, 0.5) for part in parts], rtol=1e-5)
    assert (got < [np.abs(part).max() for part in parts]).all()


@pytest.mark.parametrize("per_row", (True, False))
@pytest.mark.parametrize("value", (0.1, -3.3, 1e-30, 3e38))
def test_a_constant_is_not_clipped(value: float, per_row: bool) -> None:
    x = np.full(20, value, np.float32)
    assert (bounds_of_vector(x, clip=0.5, per_row=per_row) == np.abs(x[0])).all()


@pytest.mark.parametrize("per_row", (True, False))
def test_zeros_and_single_entries(per_row: bool) -> None:
    assert (bounds_of_vector(np.zeros(20, np.float32), clip=0.5, per_row=per_row) == 0).all()
    assert (bounds_of_vector(np.float32([-2.5]), clip=0.5, per_row=per_row) == 2.5).all()
    assert bounds_of_vector(np.zeros(0, np.float32), clip=0.5, per_row=per_row).tolist() == ([] if per_row else [0.0])


@pytest.mark.parametrize("size", (5,))
def test_padding_enters_no_statistic(size: int) -> None:
    x = (np.random.default_rng(2).normal(size=size) + 4).astype(np.float32)
    tight = bounds_of_vector(x, clip=0.5, per_row=True, block=size)
    for rows in (kernels.as_rows(x, 20), np.pad(kernels.as_rows(x, 20), ((0, 2), (0, 0)))):
        count = np.int32([size] + [0] * (rows.shape[0] - 1))
        padded = np.asarray(bound_of(jnp.asarray(rows), jnp.asarray(count), clip=0.5, per_row=True))
        np.testing.assert_allclose(padded[0], tight[0], rtol=1e-5)
        assert (padded[1:] == 0).all()
        np.testing.assert_allclose(bound_of(rows, count, clip=0.5, per_row=False), tight, rtol=1e-5)


@functools.partial(jax.jit, static_argnames=("generator",))
def draw(rows, bound, scale, key, generator="hash"):
    keys = jax.random.split(key, DRAWS)
    return jax.vmap(lambda k: kernels.ternarize(rows, bound, scale, k, generator=generator))(keys)


@pytest.mark.parametrize("generator", ("hash", "threefry"))
@pytest.mark.parametrize("scales", (1, 2))
def test_unbiased(generator: str, scales: int) -> None:
    """The mean of the draws lies within five standard deviations of the clipped gradient, entry by entry."""
    rows = np.float32([[0, 1, -1, 0.01, -0.02], [2, -3, 0.5, 1.75, -0.25]])
    bound, scale = (
        (np.float32([1.0, 1.5]), np.float32([1.0, 2.0])) if scales == 2 else (np.float32([1.5]), np.float32([2]))
    )
    trits = np.asarray(draw(rows, bound, scale, jax.random.key(scales), generator))
    assert trits.dtype == np.int8
    assert set(np.unique(trits)) == {-1, 0, 1}
    clipped = np.clip(rows, -bound[:, None], bound[:, None]).astype(np.float64)
    p = np.abs(clipped) / scale[:, None]
    deviation = scale[:, None] * np.sqrt(p * (1 - p) / DRAWS)
    error = scale[:, None] * trits.mean(axis=0, dtype=np.float64) - clipped
    assert (np.abs(error) <= 5 * deviation + 1e-6).all()
    # The variance is that of a Bernoulli variable: the draws are neither constant nor shared.
    got = trits.astype(np.float64).var(axis=0)
    want = p * (1 - p)
    assert (np.abs(got - want) <= 5 * np.sqrt(want / DRAWS) + 1e-6).all()


def test_entries_of_one_draw_are_independent() -> None:
    rows = np.full((2, 3), 0.5, np.float32)
    trits = np.asarray(draw(rows, np.float32([0.5]), np.float32([1]), jax.random.key(0))).reshape(DRAWS, 6)
    correlations = np.corrcoef(trits.T.astype(np.float64)) - np.eye(6)
    assert np.abs(correlations).max() < 5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("magnitude", (1e30, 1.0, 1e-30))
def test_certain_entries_are_certain(magnitude: float) -> None:
    """Entries at the scale are always sent with their sign, zeros never: no key decides."""
    trits = np.random.default_rng(0).integers(-1, 2, (3, 5)).astype(np.int8)
    rows = trits * np.float32(magnitude)
    for seed in range(5):
        got = kernels.ternarize(rows, np.float32([magnitude]), np.float32([magnitude]), jax.random.key(seed))
        np.testing.assert_array_equal(got, trits)


def test_subnormals_give_no_wrong_signs_and_no_nan() -> None:
    """Where subnormals are flushed they are zeros; elsewhere they are what they are."""
    rows = np.float32([[1e-40, -3e-40, 0, 1e-45]])
    scale = bounds = np.asarray(bound_of(rows, np.int32([4]), clip=0.5, per_row=True))
    assert 0 <= bounds[0] <= np.float32(3e-40)
    trits = np.asarray(kernels.ternarize(rows, bounds, scale, jax.random.key(0)))
    assert np.isin(trits * np.sign(rows), (0, 1)).all()


@pytest.mark.parametrize(("block", "generator"), [(5, "hash"), (1283, "hash"), (7, "threefry")])
def test_packing_in_the_same_pass_gives_the_same_values(block: int, generator: str) -> None:
    rows = np.asarray(np.random.default_rng(block).normal(size=(7, block)), np.float32)
    bound = np.float32([np.abs(rows).max() * 0.7])
    key = jax.random.key(block)
    packed = jax.jit(lambda r: kernels.ternarize_packed(r, bound, bound, key, generator=generator))(rows)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (7, -(-block // 5))
    trits = kernels.ternarize(rows, bound, bound, key, generator=generator)
    np.testing.assert_array_equal(kernels.unpack_ternary(packed, block), trits)


@pytest.mark.parametrize("block", (5, 13))
def test_packing_in_the_same_pass_is_unbiased(block: int) -> None:
    """Entry by entry within five standard deviations, and no two entries have to do with each other."""
    rows = np.asarray(np.random.default_rng(block).uniform(-1, 1, (2, block)), np.float32)
    bound, scale = jnp.float32([0.8]), jnp.float32([1.1])

    @jax.jit
    def drawn(keys):
        return jax.vmap(lambda k: kernels.unpack_ternary(kernels.ternarize_packed(rows, bound, scale, k), block))(keys)

    trits = np.asarray(drawn(jax.random.split(jax.random.key(9), DRAWS)), np.float64)
    clipped = np.clip(np.asarray(rows, np.float64), -0.8, 0.8)
    p = np.abs(clipped) / 1.1
    assert (np.abs(1.1 * trits.mean(axis=0) - clipped) <= 5 * 1.1 * np.sqrt(p * (1 - p) / DRAWS) + 1e-6).all()
    together = np.corrcoef(trits.reshape(DRAWS, -1).T) - np.eye(2 * block)
    assert np.abs(together).max() < 5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("per_row", (True, False))
@pytest.mark.parametrize("clip", (None, 2.5))
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_a_bad_entry_shows_in_the_bound(bad: float, clip: float | None, per_row: bool) -> None:
    rows = np.random.default_rng(3).normal(size=(5, 256)).astype(np.float32)
    rows[2, 100] = bad
    count = jnp.full((5,), 256, jnp.int32)
    bound = jax.jit(lambda r: kernels.clip_bound(r, count, clip=clip, per_row=per_row))(rows)
    assert np.isfinite(bound).tolist() == ([True, True, False, True, True] if per_row else [False])


@pytest.mark.parametrize("bad", [0.0, np.nan, -np.inf])
def test_one_reduction_finds_the_largest_and_both_sums(bad: float) -> None:
    """What XLA:TPU is given: the same maximum, bit by bit, and sums as good."""
    rows = np.random.default_rng(0).standard_normal((7, 300)).astype(np.float32)
    rows[3, 5] = bad
    both = jax.jit(lambda x: (ternary._largest_and_sums(x), ternary._largest_and_sums_at_once(x)))(rows)
    (top, *sums), (other_top, *others) = both
    assert np.float32(top).tobytes() == np.float32(other_top).tobytes()
    np.testing.assert_allclose(sums, others, rtol=1e-5)


@pytest.mark.parametrize("bad", [1.0, np.nan, -np.inf])
def test_bounds_found_together_are_those_of_each_tensor(bad: float) -> None:
    """What GPUs are given: the same tensors are clipped, a bad entry shows in its own tensor, and sums are as good."""
    draw = np.random.default_rng(0)
    rows = [draw.standard_normal((n, 40)).astype(np.float32) * scale for n, scale in ((3, 1.0), (1, 1e-20), (9, 30.0))]
    rows += [np.full((2, 40), 0.7, np.float32), np.zeros((2, 40), np.float32)]
    rows[2][4, 7] = bad
    rows[0][-1, 25:] = 0.0
    counts = [jnp.full((len(of),), 40, jnp.int32) for of in rows]
    counts[0] = counts[0].at[-1].set(25)
    both = jax.jit(lambda *x: (kernels.clip_bounds(x, counts, clip=2.5), ternary._bounds_together(x, counts, 2.5)))
    apart, together = both(*rows)
    assert [bound.shape for bound in together] == [(1,)] * len(rows)
    np.testing.assert_allclose(np.concatenate(together), np.concatenate(apart), rtol=1e-6)
    assert np.isfinite(np.concatenate(together)).tolist() == [True, True, np.isfinite(bad), True, True]
