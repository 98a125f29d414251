"""Block-scaled integers against float64, and signs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.programs import kernels

DRAWS = 8192
TINY = float(np.finfo(np.float32).tiny)
nearest = jax.jit(lambda rows: kernels.quantize(rows))
decode = jax.jit(lambda words, scale: kernels.dequantize(words, scale, words.shape[1]))


@functools.partial(jax.jit, static_argnames=("generator",))
def draw(rows, key, generator):
    return jax.vmap(lambda k: kernels.quantize(rows, 8, k, generator=generator))(jax.random.split(key, DRAWS))


def check_nearest(rows: np.ndarray) -> None:
    """Every entry within half a step; a row too small for a normal scale may decode to zeros."""
    values, scale = (np.asarray(a) for a in nearest(rows))
    assert values.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.shape == (rows.shape[0], 1)
    assert np.abs(values.astype(int)).max(initial=0) <= 127
    largest = np.abs(rows.astype(np.float64)).max(axis=1, initial=0.0)[:, None]
    small = largest < 127 * TINY
    np.testing.assert_allclose(scale, np.where(small & (scale == 0), 0, largest / 127), rtol=1e-6)
    got = np.asarray(decode(values, scale))
    assert np.isfinite(got).all()
    step = np.where(scale > 0, largest / 127, 2 * 128 * TINY)
    assert (np.abs(got - rows.astype(np.float64)) <= step * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("magnitude", (1.0, 1e30, 3.4028235e38, 1e-30, 1.5e-36, 1e-37, 1e-40, 1e-45))
def test_half_a_step_at_any_magnitude(magnitude: float) -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (4, 13)).astype(np.float32)
    rows[0, 3], rows[1, 0] = 1, -1
    check_nearest(rows * np.float32(magnitude))


@pytest.mark.parametrize("block", (1, 13))
def test_zeros_constants_and_largest_entries(block: int) -> None:
    rows = np.stack([np.full(block, v, np.float32) for v in (0, 0.1, -7, 3.4028235e38)])
    check_nearest(rows)
    values, scale = nearest(rows)
    assert scale[0, 0] == 0
    np.testing.assert_array_equal(values, np.repeat([[0], [127], [-127], [127]], block, axis=1))


def test_padding_does_not_move_the_scale() -> None:
    rows = np.random.default_rng(3).normal(size=(2, 13)).astype(np.float32)
    values, scale = kernels.quantize(rows)
    more_values, more_scale = kernels.quantize(np.pad(rows, ((0, 1), (0, 3))))
    np.testing.assert_array_equal(more_values[:2, :13], values)
    np.testing.assert_array_equal(more_scale[:2], scale)
    assert not np.asarray(more_values[2]).any()
    assert not np.asarray(more_values[:, 13:]).any()


@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_half_a_step_for_anything_finite(rows: np.ndarray) -> None:
    check_nearest(rows)


@pytest.mark.parametrize("generator", ("hash", "threefry"))
def test_stochastic_rounding_is_unbiased(generator: str) -> None:
    rows = np.float32([[1, -1, 0, 0.3, -0.004], [127, 0.25, -0.5, 63.9, -126.99]])
    values, scale = (np.asarray(a) for a in draw(rows, jax.random.key(0), generator))
    # The scale is not a matter of chance.
    assert (scale == np.asarray(nearest(rows)[1])).all()
    exact = rows.astype(np.float64) / scale[0]
    low = np.floor(exact + 1e-5)
    # Only the two neighbours are ever taken, and the entry of largest magnitude is itself.
    assert ((values >= low - 1e-9) & (values <= np.ceil(exact - 1e-5))).all()
    p = np.clip(exact - low, 0, 1)
    deviation = np.sqrt(p * (1 - p) / DRAWS)
    assert (np.abs(values.mean(axis=0, dtype=np.float64) - exact) <= 5 * deviation + 1e-4).all()


@functools.partial(jax.jit, static_argnames=("bits",))
def round_trip(rows, bits):
    words, scale = kernels.quantize(rows, bits)
    return words, scale, kernels.dequantize(words, scale, rows.shape[1], bits)


@pytest.mark.parametrize(("bits", "block"), [(4, 1), (4, 67), (2, 5), (2, 64)])
def test_packed_widths_round_to_the_nearest(bits: int, block: int) -> None:
    rows = np.random.default_rng(block).normal(size=(3, block)).astype(np.float32)
    rows[1] = 0
    words, scale, got = (np.asarray(a) for a in round_trip(rows, bits))
    assert words.dtype == np.uint8
    assert words.shape == (3, -(-block * bits // 8))
    top = {4: 7, 2: 1}[bits]
    step = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64) / top
    np.testing.assert_allclose(scale, step, rtol=1e-6)
    integers = np.round(np.divide(rows, step, where=step > 0, out=np.zeros(rows.shape)))
    np.testing.assert_allclose(got, integers * step, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bits", "generator"), [(4, "hash"), (2, "threefry")])
def test_packed_widths_are_unbiased_with_a_key(bits: int, generator: str) -> None:
    """Over all places of a word: the mean of the draws within five standard deviations of the entry."""
    rows = np.float32([[1, -1, 0, 0.3, -0.004, 0.9, -0.55, 0.125, 0.77]])

    @jax.jit
    def drawn(keys):
        def one(key):
            words, scale = kernels.quantize(rows, bits, key, generator=generator)
            return kernels.dequantize(words, scale, rows.shape[1], bits)

        return jax.vmap(one)(keys)

    got = np.asarray(drawn(jax.random.split(jax.random.key(1), DRAWS)), np.float64)
    step = 1 / {4: 7, 2: 1}[bits]
    p = rows / step - np.floor(rows / step)
    deviation = step * np.sqrt(p * (1 - p) / DRAWS)
    assert (np.abs(got.mean(axis=0) - rows) <= 5 * deviation + 1e-5).all()
    # Entries of one draw have nothing to do with each other, those that share a hash included.
    free = got[:, 0, 3:]
    assert np.abs(np.corrcoef(free.T) - np.eye(free.shape[1])).max() < 5 / np.sqrt(DRAWS)


def test_an_unknown_width_is_refused() -> None:
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2, got 3"):
        kernels.quantize(jnp.zeros((1, 4)), 3)


@pytest.mark.parametrize("block", (1, 7, 8, 9, 1024))
def test_signs(block: int) -> None:
    rows = np.random.default_rng(block).normal(size=(3, block)).astype(np.float32)
    rows[0] = 0
    rows[1, 0] = -0.0
    words = np.asarray(jax.jit(kernels.pack_signs)(rows))
    assert words.dtype == np.uint8
    assert words.shape == (3, -(-block // 8))
    np.testing.assert_array_equal(kernels.unpack_signs(words, block), np.where(rows < 0, -1.0, 1.0))


@pytest.mark.parametrize("bits", (8, 4, 2))
def test_against_the_l2_norm_it_is_unbiased(bits: int) -> None:
    """The mean of the draws within five standard deviations of the entry, at most one level from it in each."""
    rows = np.random.default_rng(bits).normal(size=(3, 9)).astype(np.float32)
    rows[1, 1:], rows[2] = 0, 0

    @jax.jit
    def drawn(keys):
        def one(key):
            words, scale = kernels.quantize(rows, bits, key, norm="l2")
            return kernels.dequantize(words, scale, rows.shape[1], bits), scale

        return jax.vmap(one)(keys)

    got, scale = (np.asarray(a, np.float64) for a in drawn(jax.random.split(jax.random.key(3), DRAWS)))
    step = np.linalg.norm(rows, axis=1, keepdims=True).astype(np.float64) / (2 ** (bits - 1) - 1)
    np.testing.assert_allclose(scale[0], step, rtol=1e-6)
    assert (np.abs(got - rows) <= step * (1 + 1e-5)).all()
    parts = np.divide(rows, step, where=step > 0, out=np.zeros(rows.shape))
    p = parts - np.floor(parts)
    deviation = step * np.sqrt(p * (1 - p) / DRAWS)
    assert (np.abs(got.mean(axis=0) - rows) <= 5 * deviation + 1e-5).all()
    # An entry that is its row's whole norm is not a matter of chance.
    np.testing.assert_allclose(got[:, 1], np.broadcast_to(rows[1], got[:, 1].shape), rtol=1e-6)


def test_a_norm_that_is_known_is_used() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)
    for norm, of_rows in (("max", kernels.largest_of_rows), ("l2", kernels.norm_of_rows)):
        words, scale = kernels.quantize(rows, norm=norm)
        known = kernels.quantize(rows, norm=norm, largest=of_rows(jnp.asarray(rows)))
        np.testing.assert_array_equal(known[0], words)
        np.testing.assert_array_equal(known[1], scale)
        np.testing.assert_allclose(kernels.quantize(rows, norm=norm, largest=jnp.ones((2,)))[1], 1 / 127, rtol=1e-6)


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="norm must be one of 'max', 'l2', got 'l1'"):
        kernels.quantize(jnp.zeros((1, 4)), norm="l1")
