"""Entries dealt out over blocks: which block has what, the largest of each, and their places in the tensor."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import compiled, kernels

RNG = np.random.default_rng(0)
DEALS = [
    (65536, 1024, 65, 256),
    (65536, 1024, 66, 64),
    (3000, 256, 13, 3),
    (3000, 256, 12, 10),
    (70, 16, 6, 7),
    (65536, 4096, 17, 16),
]


def blocks_of(x: np.ndarray, block: int, rows: int) -> np.ndarray:
    padded = np.append(x, np.zeros(block * rows - x.size, np.float32))
    return padded[np.arange(rows)[:, None] + rows * np.arange(block)]


@pytest.mark.parametrize(("size", "block", "rows", "width"), DEALS)
def test_blocks_and_back(size: int, block: int, rows: int, width: int) -> None:
    x = RNG.standard_normal(size).astype(np.float32)
    deal = kernels.Deal(size, block, rows)
    blocks = compiled(deal.blocks)(x)
    np.testing.assert_array_equal(blocks, blocks_of(x, block, rows))
    np.testing.assert_array_equal(compiled(deal.flat)(blocks), x)


@pytest.mark.parametrize(
    ("size", "block", "rows", "width", "k"),
    [(3000, 256, 12, 10, 1), (65536, 1024, 65, 256, 3), (70, 16, 6, 7, 10), (65536, 1024, 66, 64, 32)],
)
def test_the_largest_and_their_places(size: int, block: int, rows: int, width: int, k: int) -> None:
    """The only one of a block exactly, several nearly; values at positions; and a decoded tensor has them in their places."""
    k = min(k, block // 4)
    x = RNG.standard_normal(size).astype(np.float32)
    deal, blocks = kernels.Deal(size, block, rows), blocks_of(x, block, rows)
    index, value = map(np.asarray, kernels.top_of_dealt(x, deal, k))
    assert index.shape == value.shape == (rows, k)
    assert all(len(set(row)) == k for row in index)
    found = np.take_along_axis(blocks, index, axis=1)
    np.testing.assert_allclose(value, found, rtol=2**-12)
    best = -np.sort(-np.abs(blocks), axis=1)[:, :k]
    if k == 1:
        np.testing.assert_allclose(np.abs(found), best, rtol=2**-12)
    assert np.square(found).sum() >= 0.97 * np.square(best).sum()
    for dtype, place in ((jnp.float32, kernels.place_dealt), (jnp.bfloat16, kernels.place_packed)):
        sent = value.astype(dtype)
        wanted = np.zeros((block, rows), np.float32)
        np.put_along_axis(wanted.T, index, sent.astype(np.float32), axis=1)
        got = place(index, sent, deal, width)
        np.testing.assert_array_equal(got, wanted.reshape(-1)[:size].reshape(-1, width))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", [1, 4])
def test_a_bad_entry_is_taken(bad: float, k: int) -> None:
    x = RNG.standard_normal(4096 * 3).astype(np.float32)
    x[[5, 5000, 12287]] = bad
    _, value = kernels.top_of_dealt(x, kernels.Deal(x.size, 1024, 13), k)
    assert (~np.isfinite(value)).any(axis=1).sum() == len({i % 13 for i in (5, 5000, 12287)})


@pytest.mark.parametrize(
    "shape", [(32768, 256), (4096, 1024), (3, 3, 256, 512), (1000, 1000), (64, 64), (2, 512), (7,), (5, 1)]
)
def test_how_many_rows(shape: tuple[int, ...]) -> None:
    """All entries fit, at most one row in 256 is added or one, and no period is a multiple of the step."""
    size = int(np.prod(shape))
    periods = kernels.periods_of(shape)
    rows, least = kernels.dealt_rows(size, 1024, periods), -(-size // 1024)
    assert least <= rows <= least + max(1, least // 256)
    for period in periods:
        if least > 1 and 1 < period < size:
            assert len(np.unique(np.arange(1024) * rows % period)) >= min(period, 256)
