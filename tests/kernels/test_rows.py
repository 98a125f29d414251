"""A tensor as rows and back."""

import ml_dtypes
import numpy as np
import pytest

from tests.programs import kernels

BLOCK = 5


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), np.float32), ((0,), np.float32), ((6,), ml_dtypes.bfloat16), ((2, 3, 4), np.float16)]
)
def test_round_trip(shape: tuple[int, ...], dtype: type) -> None:
    size = int(np.prod(shape))
    x = (np.arange(size) - 3).astype(dtype).reshape(shape)
    rows = kernels.as_rows(x, BLOCK)
    assert rows.shape == (-(-size // BLOCK), BLOCK)
    assert rows.shape[0] == kernels.row_count(size, BLOCK)
    assert rows.dtype == np.float32
    flat = np.zeros(rows.size, np.float32)
    flat[:size] = x.astype(np.float32).ravel()
    np.testing.assert_array_equal(np.ravel(rows), flat)
    back = kernels.from_rows(rows, shape, dtype)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, x)


def test_from_rows_drops_surplus_rows() -> None:
    rows = np.arange(15, dtype=np.float32).reshape(3, BLOCK)
    np.testing.assert_array_equal(kernels.from_rows(rows, (2, 3), np.float32), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("size", (0, 4, 13))
def test_padding_is_known(size: int) -> None:
    rows = kernels.row_count(size, BLOCK)
    mask = (np.arange(rows * BLOCK) < size).reshape(rows, BLOCK)
    count = kernels.valid_counts(size, BLOCK)
    assert count.dtype == np.int32
    np.testing.assert_array_equal(count, mask.sum(axis=1))
    np.testing.assert_array_equal(kernels.valid_mask(count, BLOCK), mask)
