"""The ternary code's own promises: its scale, its clipping, its exact downlink."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax import compressors
from gradcomp_jax.compressors import RowInfo
from gradcomp_jax.compressors.ternary import Levels
from tests.programs import compiled, kernels

BLOCK = 35


@functools.partial(jax.jit, static_argnums=0)
def encode(compressor, rows, seed, side=None):
    count = np.full(rows.shape[0], rows.shape[1], np.int32)
    return compressor.encode(rows, (), RowInfo(count, jax.random.key(seed), side=side))[0]


@functools.partial(jax.jit, static_argnums=0)
def mean_of(compressor, payloads, side):
    workers = payloads.trits.shape[0]
    return compressor.reduce(payloads, RowInfo(side=side)) / workers


@pytest.mark.parametrize("granularity", ("tensor", "bucket"))
def test_a_shared_scale_sums_to_integers(granularity: str) -> None:
    """The sum is the integer sum times the scale, rounded once: 2N + 1 levels and no more."""
    compressor = compressors.ternary(bucket_size=BLOCK, granularity=granularity)
    xs = np.random.default_rng(0).normal(size=(5, 3, BLOCK)).astype(np.float32)
    count = np.full(3, BLOCK, np.int32)
    measured = np.stack([compiled(compressor.statistic)(x, RowInfo(count)) for x in xs])
    assert measured.shape == (5, 3 if granularity == "bucket" else 1)
    shared = np.broadcast_to(measured.max(axis=0), (3,))
    payloads = [encode(compressor, x, i, shared) for i, x in enumerate(xs)]
    trits = np.stack([kernels.unpack_ternary(p.trits, BLOCK) for p in payloads])
    assert all(p.scale is None for p in payloads)
    stacked = jax.tree.map(lambda *a: np.stack(a), *payloads)
    expected = trits.sum(axis=0).astype(np.float32) * shared[:, None]
    np.testing.assert_array_equal(compiled(compressor.reduce)(stacked, RowInfo(side=shared)), expected)


def test_scale_is_the_clipped_maximum() -> None:
    rows = np.random.default_rng(1).normal(size=(2, BLOCK)).astype(np.float32)
    rows[1] *= 3
    largest, sigma = np.abs(rows), rows.astype(np.float64)
    expected = {
        ("tensor", 2.0): [2 * sigma.std()] * 2,
        ("bucket", 2.0): 2 * sigma.std(axis=1),
        ("tensor", None): [largest.max()] * 2,
        ("bucket", None): largest.max(axis=1),
    }
    for (granularity, clip), want in expected.items():
        compressor = compressors.ternary(
            bucket_size=BLOCK, granularity=granularity, clip=clip, share_scale=False, downlink="ternary"
        )
        payload = encode(compressor, rows, 0)
        np.testing.assert_allclose(np.asarray(payload.scale)[:, 0], want, rtol=1e-5)
        decoded = np.asarray(compiled(compressor.decode)(payload))
        np.testing.assert_array_equal(
            np.abs(decoded[decoded != 0]), np.repeat(np.asarray(payload.scale), (decoded != 0).sum(axis=1))
        )


def test_padding_is_no_part_of_sigma() -> None:
    compressor = compressors.ternary(bucket_size=BLOCK, clip=0.5)
    x = (np.random.default_rng(2).normal(size=40) + 5).astype(np.float32)
    rows = kernels.as_rows(x, BLOCK)
    measured = compiled(compressor.statistic)(rows, RowInfo(kernels.valid_counts(40, BLOCK)))
    np.testing.assert_allclose(measured, [0.5 * x.astype(np.float64).std()], rtol=1e-5)


def test_a_wider_shared_scale_leaves_the_code_unbiased() -> None:
    compressor = compressors.ternary(bucket_size=BLOCK, clip=None)
    rows = np.random.default_rng(3).uniform(-1, 1, (1, BLOCK)).astype(np.float32)
    draws, scale = 4096, 2.0
    shared = np.float32([scale])

    @jax.jit
    @jax.vmap
    def decoded(key):
        info = RowInfo(np.int32([BLOCK]), key, side=shared)
        return compressor.decode(compressor.encode(rows, (), info)[0], info)

    got = np.asarray(decoded(jax.random.split(jax.random.key(0), draws))).mean(axis=0, dtype=np.float64)
    p = np.abs(rows) / scale
    assert (np.abs(got - rows) <= 5 * scale * np.sqrt(p * (1 - p) / draws)).all()


@functools.partial(jax.jit, static_argnums=0)
def round_trip(downlink: Levels, mean, side):
    payload, _ = downlink.encode(mean, (), RowInfo(side=side))
    return payload, downlink.decode(payload, RowInfo(side=side))


SCALES = np.float32([1.0, 0.1, 1 / 3, 3.3e30, 7e-31, 0.0])


@pytest.mark.parametrize("workers", (1, 7, 64, 200))
def test_levels_are_exact(workers: int) -> None:
    """Every integer in [-N, N] arrives, at scales of any size, and what is decoded is a fixed point."""
    downlink = compressors.ternary(bucket_size=401).downlink(workers)
    integers = np.resize(np.arange(-workers, workers + 1), (len(SCALES), 401))
    exact = integers * SCALES.astype(np.float64)[:, None] / workers
    payload, got = round_trip(downlink, exact.astype(np.float32), SCALES)
    # The product and the quotient round once each; the integers are what they were.
    np.testing.assert_allclose(got, exact, rtol=2.0**-22)
    again, same = round_trip(downlink, got, SCALES)
    np.testing.assert_array_equal(again.words, payload.words)
    np.testing.assert_array_equal(same, got)
    digits = kernels.unpack_digits(payload.words, 401, 2 * workers + 1)
    np.testing.assert_array_equal(np.asarray(digits)[:-1].astype(int) - workers, integers[:-1])
    # ceil(log2(2N + 1)) bits are enough for a digit.
    assert payload.words.dtype == jnp.uint32
    assert payload.words.shape[1] <= -(-401 // (32 // int(np.ceil(np.log2(2 * workers + 1)))))


@pytest.mark.parametrize("workers", (7, 8))
def test_levels_return_the_mean_of_payloads(workers: int) -> None:
    compressor = compressors.ternary(bucket_size=401)
    xs = np.random.default_rng(0).normal(size=(workers, 2, 401)).astype(np.float32)
    shared = np.float32([3.7, 0.9])
    stacked = jax.tree.map(lambda *a: np.stack(a), *[encode(compressor, x, i, shared) for i, x in enumerate(xs)])
    mean = mean_of(compressor, stacked, shared)
    assert np.unique(np.asarray(mean)).size > workers
    np.testing.assert_array_equal(round_trip(compressor.downlink(workers), mean, shared)[1], mean)


def test_which_downlink() -> None:
    levels = compressors.ternary(bucket_size=BLOCK)
    assert levels.downlink(8) == Levels(BLOCK, 8)
    assert levels.exact_downlink(8)
    again = compressors.ternary(bucket_size=BLOCK, downlink="ternary", packing="int8", clip=1.5)
    # A scale for each bucket, its own: the owner alone knows the mean.
    assert again.downlink(8) == compressors.ternary(
        bucket_size=BLOCK, downlink="ternary", clip=1.5, granularity="bucket", share_scale=False
    )
    assert not again.exact_downlink(8)


def test_a_shared_scale_must_be_given_to_decode() -> None:
    compressor = compressors.ternary(bucket_size=BLOCK)
    payload = encode(compressor, np.ones((1, BLOCK), np.float32), 0)
    with pytest.raises(ValueError, match=r"pass info=RowInfo\(side="):
        compressor.decode(payload)
