"""Unbiased codes: their mean over many draws, against the standard error that follows from the formula."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import compressors

from .test_laws import full

DRAWS, ROWS = 2000, 3


def decoded(compressor, rows: np.ndarray, draws: int = DRAWS) -> np.ndarray:
    """What the rows decode to, by draw: other keys, and other seeds where there are such."""

    def one(key):
        own, common = jax.random.split(key)
        seeds = gc.kernels.row_seeds(common, rows.shape[0])
        side = compressor.side_of(seeds, 0) if compressor.side_information else None
        info = compressors.RowInfo(full(rows), own, side=side)
        return compressor.decode(compressor.encode(jnp.asarray(rows), (), info)[0], info)

    keys = jax.random.split(jax.random.key(7), draws)
    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=100))(keys), np.float64)


def normal(block: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, block)).astype(np.float32)


def rounding_variance(x: np.ndarray, step) -> np.ndarray:
    """Of rounding up or down to multiples of a step with the probability that keeps the mean."""
    fraction = x / step - np.floor(x / step)
    return step**2 * fraction * (1 - fraction)


@pytest.fixture
def rotations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The platform whose rotations are computed, here on a CPU."""
    if request.param == "accelerator":
        module = importlib.import_module("gradcomp_jax.kernels.hadamard")
        monkeypatch.setattr(module, "on_cpu", lambda cpu, accelerator, *operands: accelerator(*operands))
    return request.param


EACH_PLATFORM = pytest.mark.parametrize("rotations", ("cpu", "accelerator"), indirect=True)


def assert_unbiased(got: np.ndarray, x: np.ndarray, variance: np.ndarray) -> None:
    """Standardised errors of the mean are standard normal: by their largest, their mean and their mean square.

    Entries that hardly vary move too seldom for that: they are held to the sigma of one that moves in a draw of a hundred.
    """
    least = 0.01 * variance.max(axis=1, keepdims=True)
    z = (got.mean(axis=0) - x) / np.sqrt(np.maximum(variance, least) / len(got))
    assert np.abs(z).max() < 5.5
    usual = z[variance > least]
    assert usual.size > 0.5 * z.size
    assert abs(usual.mean()) < 5 / np.sqrt(usual.size)
    assert abs((usual**2).mean() - 1) < 5 * np.sqrt(2 / usual.size)
    # Not merely the values themselves: the spread is that of the formula.
    np.testing.assert_allclose(got.var(axis=0).mean(), variance.mean(), rtol=0.1)


@pytest.mark.parametrize(("bits", "norm", "generator"), [(4, "l2", "hash"), (8, "max", "threefry"), (2, "max", "hash")])
def test_qsgd(bits: int, norm: str, generator: str) -> None:
    x = normal(121)
    compressor = compressors.block_quantized(bits=bits, block=121, stochastic=True, norm=norm, generator=generator)
    step = np.linalg.norm(x.astype(np.float64), np.inf if norm == "max" else 2, axis=1, keepdims=True)
    step = step / (2 ** (bits - 1) - 1)
    got = decoded(compressor, x)
    np.testing.assert_allclose(got / step, np.rint(got / step), atol=1e-4)
    assert_unbiased(got, x, rounding_variance(x, step))


@pytest.mark.parametrize(("bits", "fraction_bits"), [(16, 12), (16, 4), (8, 5), (8, 4)])
def test_fixed_point_within_its_range(bits: int, fraction_bits: int) -> None:
    x = np.clip(normal(128), -3.9, 3.9)
    got = decoded(compressors.fixed_point(bits=bits, fraction_bits=fraction_bits, block=128), x)
    np.testing.assert_array_equal(got, np.rint(got * 2.0**fraction_bits) / 2.0**fraction_bits)
    assert_unbiased(got, x, rounding_variance(x.astype(np.float64), 2.0**-fraction_bits))


def test_fixed_point_saturates_beyond_its_range() -> None:
    x = np.asarray([[-1e30, -4.01, -4.0, 3.96875, 3.99, 17.0]], np.float32)
    got = decoded(compressors.fixed_point(bits=8, fraction_bits=5, block=6), x, 100)
    np.testing.assert_array_equal(
        got, np.broadcast_to([-4.0, -4.0, -4.0, 3.96875, 3.96875, 3.96875], got[:, 0].shape)[:, None]
    )


@pytest.mark.parametrize(("block", "k"), [(100, 7), (128, 16), (13, 13), (33, 1), (11, 4)])
def test_random_k_rescaled(block: int, k: int) -> None:
    """Every entry is chosen with probability k / block, also where the bins differ in size."""
    x = normal(block)
    compressor = compressors.random_k(k / block, block=block, rescale=True, dtype=jnp.float32)
    got = decoded(compressor, x)
    assert ((got != 0).sum(axis=2) == k).all()
    if k == block:
        np.testing.assert_allclose(got, np.broadcast_to(x, got.shape), rtol=1e-6)
        return
    assert_unbiased(got, x, x.astype(np.float64) ** 2 * (block / k - 1))


@pytest.mark.slow
@EACH_PLATFORM
@pytest.mark.parametrize(("bits", "left"), [(1, 0.571), (2, 0.133), (3, 0.036), (4, 0.0096)])
def test_rotated_over_the_seeds(bits: int, left: float, rotations: str) -> None:
    """``left`` is the papers' relative square error."""
    x = normal(1024)[:2]
    got = decoded(compressors.rotated(bits, block=1024), x, 1000)
    # Along the block itself there is no error at all, in any draw; on accelerators that of rounding, which averages out.
    square = (x.astype(np.float64) ** 2).sum(axis=1)
    along = (got * x).sum(axis=2) / square
    np.testing.assert_allclose(along, 1, rtol=1e-5 if rotations == "cpu" else 1e-3)
    np.testing.assert_allclose(along.mean(axis=0), 1, rtol=5e-5)
    # The error is spread evenly, so it has one variance: the paper's.
    assert_unbiased(got, x, np.broadcast_to(left * square[:, None] / 1024, x.shape))


@pytest.mark.parametrize(
    ("bits", "few"),
    [(1, (1, 0.5)), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, (5, 1, 0.5, 0.2)), (4, (2, 2, 2))))],
)
@EACH_PLATFORM
def test_rotated_where_few_entries_are_all(bits: int, few: tuple[float, ...], rotations: str) -> None:
    """After one Hadamard rotation two entries give two magnitudes: at 1 bit the smaller would never be seen."""
    x = np.zeros((2, 1024), np.float32)
    x[0, : len(few)] = few
    x[1, 100 : 100 + len(few)] = few[::-1]
    got = decoded(compressors.rotated(bits, block=1024), x, 1000)
    variance = got.var(axis=0)
    z = (got.mean(axis=0) - x) / np.sqrt(np.maximum(variance, 0.01 * variance.max(axis=1, keepdims=True)) / len(got))
    assert np.abs(z).max() < 5.5
    # The error is no more than of any other block.
    error = ((got - x) ** 2).sum(axis=2).mean(axis=0) / (x.astype(np.float64) ** 2).sum(axis=1)
    assert error.max() < 1.1 * {1: 0.571, 2: 0.133, 4: 0.0096}[bits]


@pytest.mark.slow
@pytest.mark.parametrize("few", [(1, 0.01, 0.02), (1, 0.5), (2, 2, 2)])
@pytest.mark.parametrize(
    ("block", "bits", "rotations"),
    [
        *((block, bits, "cpu") for block, bits in ((32, 1), (32, 4), (64, 1), (64, 2), (256, 1), (1024, 1), (1024, 4))),
        (32, 4, "accelerator"),
        (1024, 1, "accelerator"),
    ],
    indirect=["rotations"],
)
def test_rotated_small_entries_beside_large_ones(block: int, bits: int, few: tuple[float, ...], rotations: str) -> None:
    """Within five standard errors, and a thousandth of the block's norm, of the mean of very many draws."""
    x = np.zeros((1, block), np.float32)
    x[0, : len(few)] = few
    compressor = compressors.rotated(bits, block=block)
    together = 256

    def moments(total, key):
        seeds = gc.kernels.row_seeds(key, together)
        rows = jnp.broadcast_to(jnp.asarray(x), (together, block))
        info = compressors.RowInfo(full(rows), key, side=seeds)
        got = compressor.decode(compressor.encode(rows, (), info)[0], info) - x
        return jax.tree.map(jnp.add, total, (got.sum(axis=0), (got * got).sum(axis=0))), None

    draws = 2**23 // block
    keys = jax.random.split(jax.random.key(11), draws // together)
    zeros = (jnp.zeros(block), jnp.zeros(block))
    first, second = jax.jit(lambda keys: jax.lax.scan(moments, zeros, keys)[0])(keys)
    mean, square = np.asarray(first, np.float64) / draws, np.asarray(second, np.float64) / draws
    error = np.sqrt(np.maximum(square - mean**2, 0) / draws)
    assert (np.abs(mean) <= 5 * error + 1e-3 * np.linalg.norm(x)).all(), np.abs(mean).max()


def test_rotations_of_short_blocks_are_not_called_unbiased() -> None:
    with pytest.raises(ValueError, match=r"a block of 16 .*use block=32 or more.*error_feedback=True"):
        compressors.rotated(1, block=16)
    assert not compressors.rotated(1, block=16, unbiased=False).unbiased


@pytest.mark.parametrize("bits", [2])
def test_rotated_with_the_least_error_has_less(bits: int) -> None:
    x = normal(256)
    error = [
        ((decoded(compressors.rotated(bits, block=256, unbiased=u), x, 100) - x) ** 2).mean() for u in (False, True)
    ]
    assert error[0] < error[1]
