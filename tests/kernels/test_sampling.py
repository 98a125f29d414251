"""Random positions, counted; and the entries that are not zero against numpy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.programs import kernels

choose = jax.jit(kernels.random_of_rows, static_argnums=(1, 2))
nonzero = jax.jit(kernels.nonzero_of_rows, static_argnums=1)


def seeds(rows: int, number: int = 0) -> jax.Array:
    return kernels.row_seeds(jax.random.key(number), rows)


def check_positions(index: np.ndarray, block: int) -> None:
    assert index.dtype == np.int32
    assert ((index >= 0) & (index < block)).all()
    assert (np.diff(np.sort(index, axis=1), axis=1) > 0).all()


@pytest.mark.parametrize(("block", "k", "rows"), [(1, 0, 3), (1, 1, 5), (70, 69, 2), (33, 8, 4), (64, 64, 0)])
def test_positions_are_distinct(block: int, k: int, rows: int) -> None:
    index = np.asarray(choose(seeds(rows, block), block, k))
    assert index.shape == (rows, k)
    check_positions(index, block)


@pytest.mark.slow
@given(st.integers(1, 70), st.integers(0, 70), st.integers(0, 5))
def test_positions_of_any_rows_are_distinct(block: int, k: int, rows: int) -> None:
    test_positions_are_distinct(block, min(k, block), rows)


@pytest.mark.parametrize(("block", "k"), [(12, 4), (7, 7), (1, 1)])
def test_every_entry_is_as_likely_as_any_other(block: int, k: int) -> None:
    rows = 20_000
    index = np.asarray(choose(seeds(rows), block, k))
    check_positions(index, block)
    p = k / block
    fraction = np.bincount(index.ravel(), minlength=block) / rows
    assert (np.abs(fraction - p) <= 5 * np.sqrt(p * (1 - p) / rows)).all()
    # So is each place of the result: its values need not be known to belong to some part of the row.
    first = np.bincount(index[:, 0], minlength=block) / rows
    assert (np.abs(first - 1 / block) <= 5 * np.sqrt(1 / block / rows)).all()


@pytest.mark.parametrize(("block", "k"), [(12, 4), (10, 3)])
def test_one_of_each_bin_of_a_turned_row(block: int, k: int) -> None:
    """For every row there is a turn after which each bin holds one position."""
    edges = [j * block // k for j in range(k + 1)]
    for row in np.asarray(choose(seeds(200), block, k)):
        turned = [np.histogram((row - turn) % block, bins=edges)[0] for turn in range(block)]
        assert any((counts == 1).all() for counts in turned)


def test_positions_follow_from_the_seed() -> None:
    drawn = seeds(4)
    index = np.asarray(choose(drawn, 64, 5))
    np.testing.assert_array_equal(choose(drawn[2:], 64, 5), index[2:])
    np.testing.assert_array_equal(jax.vmap(lambda s: kernels.random_of_rows(s[None], 64, 5)[0])(drawn), index)
    assert (np.asarray(choose(kernels.fold_seeds(drawn, 1), 64, 5)) != index).any(axis=1).all()


def check_nonzero(rows: np.ndarray, k: int) -> None:
    """Of rows with at most k: the entries in order, then zeros at other positions."""
    index, value = (np.asarray(a) for a in nonzero(rows, k))
    assert value.dtype == np.float32
    assert index.shape == value.shape == (rows.shape[0], k)
    check_positions(index, rows.shape[1])
    for row, places, values in zip(rows, index, value, strict=True):
        wanted = np.flatnonzero(row)
        np.testing.assert_array_equal(places[: wanted.size], wanted)
        np.testing.assert_array_equal(values[: wanted.size], row[wanted])
        assert not values[wanted.size :].any()
    np.testing.assert_array_equal(kernels.place_in_rows(index, value, rows.shape[1]), rows)


@pytest.mark.parametrize(("block", "k"), [(1, 1), (64, 64), (1000, 30)])
def test_all_that_is_not_zero(block: int, k: int) -> None:
    rng = np.random.default_rng(block)
    rows = np.zeros((8, block), np.float32)
    for row in rows[1:-1]:
        row[rng.permutation(block)[: rng.integers(k + 1)]] = rng.normal()
    # As many as there is room for, close to what backends flush, among zeros with a sign.
    rows[-1] = -0.0
    rows[-1, rng.permutation(block)[:k]] = 2e-38
    check_nonzero(rows, k)


@given(
    hnp.arrays(np.float32, (3, 9), elements=st.sampled_from([0.0, -0.0, 1.0, -2.5, 3e38, 1e-37])),
    st.sampled_from((0, 1, 4, 9)),
)
def test_any_zeros_and_numbers(rows: np.ndarray, k: int) -> None:
    kept = np.where(np.cumsum(rows != 0, axis=1) <= k, rows, np.float32(0))
    check_nonzero(kept, k)
    # Of too many, the first.
    np.testing.assert_array_equal(nonzero(rows, k)[1], nonzero(kept, k)[1])


def test_a_bad_entry_is_not_zero() -> None:
    rows = np.zeros((2, 16), np.float32)
    rows[0, 9], rows[1, 3] = np.nan, -np.inf
    index, value = nonzero(rows, 2)
    np.testing.assert_array_equal(index[:, 0], [9, 3])
    np.testing.assert_array_equal(value, [[np.nan, 0], [-np.inf, 0]])


def test_more_positions_than_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="k must be between 0 and the block of 4, got 5"):
        kernels.random_of_rows(seeds(1), 4, 5)
    with pytest.raises(ValueError, match="k must be between 0 and the block of 4, got 5"):
        kernels.nonzero_of_rows(jnp.zeros((1, 4)), 5)
