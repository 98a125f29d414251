"""Selections against sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradcomp_jax.kernels import selection
from tests.programs import kernels

# Below and above the width at which the reduction becomes a two-stage one.
BLOCKS = (1, 65, 1024)
top = jax.jit(kernels.top_of_rows, static_argnums=1)
take = jax.jit(kernels.take_from_rows)
place = jax.jit(kernels.place_in_rows, static_argnums=2)


def check_top(rows: np.ndarray, k: int) -> None:
    """Positions in range, distinct, and no magnitude left behind that is larger than one taken."""
    n, block = rows.shape
    index = np.asarray(top(rows, k))
    assert index.dtype == np.int32
    assert index.shape == (n, k)
    assert ((index >= 0) & (index < block)).all()
    # The key names position and sign in the low bits of the mantissa, so it tells magnitudes apart up to those.
    dropped_bits = max(1, (block - 1).bit_length()) + 1
    for row, found in zip(np.abs(rows), index, strict=True):
        assert len(set(found.tolist())) == k
        wanted = np.sort(row)[block - k :]
        assert (np.sort(row[found]) >= wanted * (1 - 2.0 ** (dropped_bits - 23)) - 1e-37).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_the_largest_of_each_row(block: int) -> None:
    rng = np.random.default_rng(block)
    rows = [
        rng.normal(size=(4, block)),
        rng.normal(size=(1, block)) * 1e-30,
        rng.normal(size=(1, block)) * 1e30,
        # Neighbours that differ in a bit the key is allowed to drop, and in one that it is not.
        1 + rng.permutation(block)[None] * 2.0**-20,
        1 + (rng.permutation(block)[None] == 0) * 2.0**-12,
        np.eye(block)[:1],
        -np.eye(block)[-1:],
        np.full((1, block), -2.0),
        np.zeros((1, block)),
        np.full((1, block), -0.0),
    ]
    check_top(np.concatenate(rows).astype(np.float32), 1)


def test_one_of_1024_is_exact_to_the_documented_difference() -> None:
    rows = np.full((2, 1024), 1, np.float32)
    rows[0, 100] = 1 + 2.0**-12
    rows[1, 1000] = -1 - 2.0**-12
    np.testing.assert_array_equal(top(rows, 1), [[100], [1000]])


@pytest.mark.parametrize(("block", "k"), [(5, 2), (64, 3), (1024, 1), (1024, 4), (1024, 32)])
def test_values_come_with_the_positions(block: int, k: int) -> None:
    """Cut to the bits that the key has left, towards zero, sign and all."""
    rows = np.random.default_rng(block + k).normal(size=(6, block)).astype(np.float32)
    index, value = (np.asarray(a) for a in jax.jit(kernels.top_entries, static_argnums=1)(rows, k))
    exact = np.take_along_axis(rows, index, axis=1)
    assert (np.sign(value) == np.sign(exact)).all()
    lost = np.abs(exact) - np.abs(value)
    assert (lost >= 0).all()
    assert (lost <= np.abs(exact) * 2.0 ** ((block - 1).bit_length() + 1 - 23)).all()


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_a_bad_entry_is_taken_and_seen(bad: float) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 1024)).astype(np.float32)
    rows[1, 77] = bad
    index, value = (np.asarray(a) for a in kernels.top_entries(jnp.asarray(rows), 1))
    assert index[1, 0] == 77
    assert np.isfinite(value[:, 0]).tolist() == [True, False, True]


@pytest.mark.parametrize(("block", "k", "least"), [(1024, 1, 1.0), (1024, 4, 0.93), (1024, 32, 0.9), (4096, 8, 0.93)])
def test_recall(block: int, k: int, least: float) -> None:
    """Of normal entries in random order: a lane is shared by chance with (k - 1) / 2 of at least 16 k lanes, and a part
    that gives 16 of 32 misses what it has beyond 16 (a hypergeometric count: .07 of them)."""
    rows = np.asarray(np.random.default_rng(k).normal(size=(200, block)), np.float32)
    found = float(kernels.recall(rows, k))
    assert least <= found <= 1.0
    index = np.asarray(top(rows, k))
    largest = np.argsort(-np.abs(np.asarray(rows)), axis=1)[:, :k]
    slow = np.mean([len(set(a) & set(b)) / k for a, b in zip(index.tolist(), largest.tolist(), strict=True)])
    assert abs(slow - found) < 0.01


@pytest.mark.parametrize(("block", "k"), [(5, 5), (65, 4), (256, 17)])
def test_several_of_each_row(block: int, k: int) -> None:
    rng = np.random.default_rng(k)
    rows = np.concatenate([rng.normal(size=(3, block)), np.zeros((1, block)), -np.ones((1, block)), np.eye(block)[:1]])
    check_top(rows.astype(np.float32), k)


@given(
    hnp.arrays(np.float32, (2, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.integers(1, 3),
)
def test_the_largest_of_anything_finite(rows: np.ndarray, k: int) -> None:
    check_top(rows, k)


def test_no_rows_and_nothing_wanted() -> None:
    assert top(jnp.zeros((0, 5)), 2).shape == (0, 2)
    assert take(jnp.zeros((0, 5)), jnp.zeros((0, 2), jnp.int32)).shape == (0, 2)
    assert place(jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2)), 5).shape == (0, 5)


# Up to eight entries go through a comparison, more through a scatter.
@pytest.mark.parametrize(("k", "dtype"), [(1, np.int32), (9, np.uint8)])
def test_place_and_take_undo_each_other(k: int, dtype: type) -> None:
    rng = np.random.default_rng(k)
    index = np.stack([rng.permutation(13)[:k] for _ in range(3)]).astype(dtype)
    value = rng.normal(size=(3, k)).astype(np.float32)
    dense = np.asarray(place(index, value, 13))
    expected = np.zeros((3, 13), np.float32)
    np.put_along_axis(expected, index.astype(int), value, axis=1)
    np.testing.assert_array_equal(dense, expected)
    np.testing.assert_array_equal(take(dense, index), value)
    base = rng.normal(size=(3, 13)).astype(np.float32)
    np.testing.assert_array_equal(place(index, value, 13, into=base), base + expected)


@pytest.mark.parametrize(("block", "k"), [(1, 1), (13, 1), (13, 5), (13, 13)])
def test_exactly_the_largest_of_each_row(block: int, k: int) -> None:
    rows = np.random.default_rng(block + k).standard_normal((6, block)).astype(np.float32)
    index = np.asarray(kernels.exact_top_of_rows(jnp.asarray(rows), k))
    np.testing.assert_array_equal(index, np.argsort(-np.abs(rows), axis=1)[:, :k])


@pytest.mark.parametrize("k", (2, 8, 40))
def test_the_form_for_tpu_finds_the_same(k: int) -> None:
    """Run here, where approx_max_k is exact: positions, signs and magnitudes survive the way through floats."""
    rows = np.random.default_rng(k).normal(size=(9, 256)).astype(np.float32) * np.float32(1e-3)
    rows[0] = 0
    rows[1, :200] = 0
    rows[2, 5], rows[3, 6], rows[4, 7] = np.nan, np.inf, -np.inf
    rows[5] *= np.float32(1e38)
    rows[6] *= np.float32(1e-36)
    low_bits = selection._low_bits(256)
    keys = selection._keys(jnp.asarray(rows), low_bits)
    best = np.asarray(jax.jit(lambda x: selection.approximate_best(x, k=k, low_bits=low_bits))(keys))
    index = (best & 511) >> 1
    assert all(len(set(row)) == k for row in index.tolist())
    np.testing.assert_array_equal(best & 1, np.signbit(np.take_along_axis(rows, index, axis=1)))
    # Equal but for the bit that the magnitude pays.
    np.testing.assert_array_equal(best, np.take_along_axis(np.asarray(keys), index, axis=1) & ~(1 << low_bits))
    magnitude = np.abs(np.nan_to_num(rows, nan=np.inf))
    smallest = np.take_along_axis(magnitude, index, axis=1).min(axis=1)
    exact = np.sort(magnitude, axis=1)[:, -k]
    assert (smallest >= exact * (1 - 2.0**-12)).all()
