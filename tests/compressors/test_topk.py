"""The selection's own promises: what it sends, what it leaves, what rounding takes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradcomp_jax import compressors
from gradcomp_jax.compressors.topk import _MOST_COMPARED, TopKPayload, block_for
from tests.programs import compiled


@functools.partial(jax.jit, static_argnums=0)
def encode(compressor, rows):
    count = np.full(rows.shape[0], rows.shape[1], np.int32)
    return compressor.encode(rows, (), compressors.RowInfo(count))[0]


def rows_of(block: int) -> np.ndarray:
    rng = np.random.default_rng(block)
    return np.concatenate([rng.normal(size=(3, block)), np.zeros((1, block)), np.full((1, block), 0.1)]).astype(
        np.float32
    )


@pytest.mark.parametrize(("k", "dtype"), [(3, ml_dtypes.bfloat16), (5, np.float32)])
def test_the_largest_arrive_and_nothing_else(k: int, dtype: type) -> None:
    compressor = compressors.topk(k / 13, block=13, dtype=dtype)
    assert (compressor.k, compressor.block) == (k, 13)
    rows = rows_of(13)
    payload = encode(compressor, rows)
    assert payload.value.dtype == dtype
    decoded = np.asarray(compiled(compressor.decode)(payload))
    for row, got in zip(rows, decoded, strict=True):
        sent = np.flatnonzero(got)
        assert len(sent) <= k
        np.testing.assert_array_equal(got[sent], row[sent].astype(dtype).astype(np.float32))
        left = np.delete(np.abs(row), sent)
        assert np.abs(row[sent]).min(initial=np.inf) >= left.max() * (1 - 2.0**-18)
    # A constant is not taken for nothing, nor for everything; zeros send zeros.
    assert (decoded[-1] != 0).sum() == k
    assert not decoded[-2].any()


@pytest.mark.parametrize(("k", "dtype"), [(3, ml_dtypes.bfloat16), (5, np.float32)])
def test_rounding_and_what_is_decoded_make_the_rows(k: int, dtype: type) -> None:
    compressor = compressors.topk(k / 13, block=13, dtype=dtype)
    rows = rows_of(13)
    payload = encode(compressor, rows)
    rounding = compiled(compressor.rounding)(rows, payload)
    np.testing.assert_array_equal(rounding.index, payload.index)
    assert rounding.value.dtype == np.float32
    decoded, lost = np.asarray(compiled(compressor.decode)(payload)), np.asarray(compiled(compressor.decode)(rounding))
    kept = np.zeros(rows.shape, bool)
    np.put_along_axis(kept, np.asarray(payload.index).astype(int), True, axis=1)
    # The rounding to bfloat16 is exact in float32, so the two add up to the bit.
    np.testing.assert_array_equal((decoded + lost)[kept], rows[kept])
    assert not lost[~kept].any()
    assert not lost[rows == 0].any()
    assert lost.any() == (dtype != np.float32)


@pytest.mark.parametrize("k", (1, 5))
def test_int8_values_keep_the_laws(k: int) -> None:
    """Values within half a step of the largest, and what is decoded plus the rounding is the entry to the bit."""
    compressor = compressors.topk(k / 13, block=13, dtype=jnp.int8)
    rows = rows_of(13)
    payload = encode(compressor, rows)
    assert payload.value.dtype == np.int8
    assert payload.scale.shape == (rows.shape[0], 1)
    decoded = np.asarray(compiled(compressor.decode)(payload))
    lost = np.asarray(compiled(compressor.decode)(compiled(compressor.rounding)(rows, payload)))
    chosen = np.zeros(rows.shape, bool)
    np.put_along_axis(chosen, np.asarray(payload.index).astype(int), True, axis=1)
    np.testing.assert_array_equal((decoded + lost)[chosen], rows[chosen])
    assert not decoded[~chosen].any()
    assert (np.abs(lost) <= np.abs(rows).max(axis=1, keepdims=True) / 127 * 0.5001).all()
    for bad in (np.nan, np.inf):
        rows[1, 5] = bad
        assert not compiled(compressor.finite)(encode(compressor, rows), None)


@pytest.mark.parametrize("k", (1, 5, 13))
def test_the_mask_marks_what_decodes_to_something(k: int) -> None:
    compressor = compressors.topk(k / 13, block=13)
    payload = encode(compressor, rows_of(13))
    np.testing.assert_array_equal(
        compiled(compressor.sent_mask)(payload), np.asarray(compiled(compressor.decode)(payload)) != 0
    )


def naively_left(index, value, mean_index, mean_value) -> np.ndarray:
    """What of one worker's entries stays with the owner, entry by entry.

    All of an entry that the mean has. Of the others what exceeds the smallest magnitude of the row's mean, which is zero
    where the mean has fewer entries than places.
    """
    left = np.zeros(value.shape, np.float32)
    for row, place in np.ndindex(value.shape):
        smallest = np.abs(mean_value[row]).min()
        entry, number = index[row, place], value[row, place]
        found = any(i == entry and v != 0 for i, v in zip(mean_index[row], mean_value[row], strict=True))
        left[row, place] = number if found else np.sign(number) * max(abs(number) - smallest, 0)
    return left


@pytest.mark.parametrize(("k", "kept"), [(2, 3), (8, 16), (8, 17), (20, 30)])
def test_what_a_worker_leaves_with_the_owner(k: int, kept: int) -> None:
    """Few pairs of positions are compared and more are looked up; of one payload, and of several stacked ones."""
    assert (k * kept <= _MOST_COMPARED) == (kept <= 16)
    block, rows, workers = 64, 6, 3
    compressor, rng = compressors.topk(k / block, block=block), np.random.default_rng(k * kept)

    def drawn(count: int, *leading: int) -> TopKPayload:
        index = np.argsort(rng.random((*leading, rows, block)), axis=-1)[..., :count]
        return TopKPayload(index.astype(np.uint8), rng.normal(size=index.shape).astype(ml_dtypes.bfloat16))

    sent, mean = drawn(k, workers), drawn(kept)
    # Nothing of a row is sent, a row has only what the mean has, and the mean of a row has an entry less than it could.
    sent.value[:, 1] = 0
    sent.index[:, 2] = mean.index[2, :k]
    mean.value[3, 0] = 0
    numbers = [p.value.astype(np.float32) for p in (sent, mean)]
    want = np.stack([naively_left(i, v, mean.index, numbers[1]) for i, v in zip(sent.index, numbers[0], strict=True)])
    assert (want != numbers[0]).any()
    left = jax.jit(compressor.left_with_owner)
    for payload, expected in ((sent, want), (jax.tree.map(lambda a: a[0], sent), want[0])):
        got = left(payload, mean)
        np.testing.assert_array_equal(got.index, payload.index)
        assert got.value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got.value, expected.astype(ml_dtypes.bfloat16))


def test_the_downlink_keeps_what_was_asked_for() -> None:
    compressor = compressors.topk(3 / 13, block=13, downlink_density=5 / 13)
    assert compressor.downlink(8).k == 5
    assert compressor.downlink(8).block == 13
    assert not compressor.exact_downlink(8)


@pytest.mark.parametrize(("k", "downlink"), [(1, 2), (2, 3), (3, 4), (8, 12), (9, 13), (13, 13)])
def test_the_downlink_keeps_half_as_many_again_and_one_more(k: int, downlink: int) -> None:
    expected = compressors.topk(downlink / 13, block=13, downlink_density=downlink / 13)
    assert compressors.topk(k / 13, block=13).downlink(8) == expected


@pytest.mark.parametrize(
    ("block", "dtype"), [(256, jnp.uint8), (257, jnp.uint16), (65536, jnp.uint16), (65537, jnp.uint32)]
)
def test_indices_are_as_narrow_as_the_block_allows(block: int, dtype: type) -> None:
    compressor = compressors.topk(1 / block, block=block)
    rows = np.zeros((2, block), np.float32)
    rows[0, -1] = rows[1, 0] = 1
    payload = encode(compressor, rows)
    assert payload.index.dtype == dtype
    np.testing.assert_array_equal(payload.index, [[block - 1], [0]])
    np.testing.assert_array_equal(compiled(compressor.decode)(payload), rows)


@pytest.mark.parametrize("density", (1.0, 0.25, 1e-3, 4e-4, 1e-4, 2e-5))
def test_density_is_met_by_the_default_block(density: float) -> None:
    compressor = compressors.topk(density)
    assert compressor.block == block_for(density)
    assert 1024 <= compressor.block <= 65536
    assert compressor.k / compressor.block == pytest.approx(density, rel=0.35)


def test_a_density_below_one_of_the_longest_block_sends_one() -> None:
    compressor = compressors.topk(1e-7)
    assert (compressor.block, compressor.k) == (65536, 1)


def test_downlinks_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="Rotated needs side information, owners have none; use block_quantized"):
        compressors.topk(0.1, block=64, downlink=compressors.rotated(4, block=64))
    with pytest.raises(ValueError, match="the downlink has blocks of 32, expected 64; pass block=64"):
        compressors.topk(0.1, block=64, downlink=compressors.block_quantized(block=32))
    with pytest.raises(ValueError, match=r"cannot hold a selection with downlink='union'.*use downlink='topk'"):
        compressors.in_frequency(compressors.topk(0.1, block=64, downlink="union"))
    senders = compressors.in_frequency(compressors.topk(0.1, block=64), average="senders")
    with pytest.raises(ValueError, match=r"counts who sent what: use collective='all_gather'"):
        senders.downlink(4)
