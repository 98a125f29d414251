"""Formats of matrix units against NumPy and ml_dtypes: every bit of elements and scales, and what they decode to."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.programs import kernels

TINY, MOST = (float(getattr(np.finfo(np.float32), name)) for name in ("tiny", "max"))
E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
BLOCK = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
TOP = {"mxfp8": 448, "mxfp4": 6, "nvfp4": 6}
EMAX = {"mxfp8": 8, "mxfp4": 2}
SHAPE = (48, 64)
EACH = pytest.mark.parametrize("name", BLOCK)


@functools.partial(jax.jit, static_argnums=1)
def both(rows, name):
    coded = kernels.to_microscaled(rows, name)
    return coded, kernels.from_microscaled(coded, name)


@functools.partial(jax.jit, static_argnums=1)
def read(coded, name):
    """What ``jax.nn.scaled_matmul`` takes: elements and scales of their own dtypes, blocks along the last dimension."""
    dtypes = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    if name != "mxfp8":
        dtypes = jnp.float4_e2m1fn, jnp.float8_e4m3fn if name == "nvfp4" else jnp.float8_e8m0fnu
    elements, scales = (jax.lax.bitcast_convert_type(a, dtype) for a, dtype in zip(coded, dtypes, strict=False))
    elements = elements.reshape(len(elements), -1).astype(jnp.float32)
    scaled = elements * jnp.repeat(scales.astype(jnp.float32), BLOCK[name], axis=1)
    return scaled if coded.row_scale is None else scaled * coded.row_scale


nearest, number = jax.jit(kernels.to_e2m1), jax.jit(kernels.from_e2m1)


def round_trip(rows, name):
    return jax.tree.map(np.asarray, both(rows, name))


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Zero, with the sign of what is divided, where the scale is zero."""
    return np.divide(a, b, out=np.copysign(np.zeros_like(a), a), where=b != 0)


def normal(x: np.ndarray) -> np.ndarray:
    """Flushes subnormal numbers, as XLA's CPU backend does everywhere, and all backends with what has such a scale."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def reference(rows: np.ndarray, name: str):
    """Bits of elements and scales, the scales of the rows, and what all that stands for."""
    blocks = normal(rows).reshape(len(rows), -1, BLOCK[name])
    largest = np.abs(blocks).max(axis=2)
    outer = np.ones((len(rows), 1), np.float32)
    if name == "nvfp4":
        outer = normal(largest.max(axis=1, keepdims=True) * np.float32(1 / 2688))
        scale = np.minimum(divided(largest * np.float32(1 / 6), outer), 448).astype(E4M3)
    else:
        exponent = np.frexp(largest)[1] - 1 - EMAX[name]
        scale = np.maximum(np.where(largest > 0, exponent, -127), -127)
        scale = np.ldexp(np.float32(1), scale).astype(E8M0)
    unit = normal(scale.astype(np.float32) * outer)[..., None]
    scaled = np.clip(divided(blocks, np.broadcast_to(unit, blocks.shape)), -TOP[name], TOP[name])
    elements = scaled.astype(E4M3 if name == "mxfp8" else E2M1)
    decoded = elements.astype(np.float32) * scale.astype(np.float32)[..., None] * outer[..., None]
    words = elements.view(np.uint8).reshape(rows.shape)
    if name != "mxfp8":
        words = words[:, ::2] | words[:, 1::2] << 4
    return words, scale.view(np.uint8), outer, decoded.reshape(rows.shape)


def check(rows: np.ndarray, name: str) -> None:
    coded, decoded = round_trip(rows, name)
    words, scale, outer, want = reference(rows, name)
    np.testing.assert_array_equal(coded.scale, scale)
    np.testing.assert_array_equal(coded.words, words)
    if name == "nvfp4":
        np.testing.assert_array_equal(coded.row_scale, outer)
    else:
        assert coded.row_scale is None
    np.testing.assert_array_equal(normal(decoded), normal(want))
    assert np.isfinite(decoded).all()


def hard_rows() -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=SHAPE).astype(np.float32)
    # From one row to the next the magnitude falls, from near the largest number to zero.
    rows[:24] *= np.float32(10.0) ** np.linspace(37, -37.5, 24, dtype=np.float32)[:, None]
    rows[24] = 0
    rows[25] = -0.0
    rows[26] = MOST
    rows[27] = -MOST
    rows[28, 1:] = 0  # one entry in the whole row
    rows[29, 1:] *= 1e-6  # one large entry, beside which all are small
    rows[30] *= np.exp(5 * rng.normal(size=64)).astype(np.float32)
    rows[31] = np.float32(1.5) * TINY
    rows[31, 40:] /= 4  # subnormal
    rows[32] = np.float32(64.0) * TINY
    rows[33, :32] *= 1e-30  # a block whose scale rounds to zero beside the other
    rows[34] = 2.0 ** rng.integers(-12, 12, 64)
    # Middles between numbers, and the floats next to them, where the largest is the scale times the largest number.
    levels = np.arange(16, dtype=np.uint8)[:8].view(E2M1).astype(np.float32)
    middles = (levels[1:] + levels[:-1]) / 2
    rows[35:38, :8] = np.append(middles, 6)
    rows[35:38, 8:] = 0
    rows[36, :7] = np.nextafter(middles, np.float32(9))
    rows[37, :7] = np.nextafter(middles, np.float32(-9))
    rows[38] = np.where(rows[38] > 0, 7.99, -6.01)  # what saturates
    rows[39] = -rows[35]
    return rows


@EACH
def test_every_bit_is_that_of_the_specification(name: str) -> None:
    check(hard_rows(), name)


@pytest.mark.slow
@EACH
@given(hnp.arrays(np.float32, SHAPE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_of_anything_finite(name: str, rows: np.ndarray) -> None:
    check(rows, name)


@EACH
def test_what_is_not_finite_shows_in_its_block(name: str) -> None:
    """As a NaN of its scale; MX loses nothing of the other blocks."""
    rows = hard_rows()
    for row, bad in enumerate((np.nan, np.inf, -np.inf)):
        rows[row, 5] = bad
    coded, decoded = round_trip(rows, name)
    if name != "nvfp4":
        assert (coded.scale[:3, 0] == 0xFF).all() and np.isnan(coded.scale[:3, 0].view(E8M0).astype(np.float32)).all()
        rows[:3, : BLOCK[name]] = 0
        np.testing.assert_array_equal(decoded[:, BLOCK[name] :], round_trip(rows, name)[1][:, BLOCK[name] :])
    else:
        assert not np.isfinite(coded.row_scale[:3]).any() and np.isfinite(coded.row_scale[3:]).all()
    assert not np.isfinite(decoded[:3, 5]).any() and np.isfinite(decoded[3:]).all()


def test_four_bits_round_once_to_the_nearest_and_in_the_middle_to_the_even() -> None:
    codes = np.arange(16, dtype=np.int32)
    numbers = codes.astype(np.uint8).view(E2M1).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(number(codes)).view(np.uint32), numbers.view(np.uint32))
    middles = (numbers[1:8] + numbers[:7]) / 2
    up, down = (np.nextafter(middles, np.float32(side)) for side in (9, -9))
    random = np.random.default_rng(0).uniform(0, 6, 5_000).astype(np.float32)
    values = np.concatenate([numbers[:8], middles, up, down, random, random / 64, [5.999, 6.001, 7, 1e30, 1e-30]])
    values = np.concatenate([values, -values]).astype(np.float32)
    want = np.clip(values, -6, 6).astype(E2M1).view(np.uint8)
    np.testing.assert_array_equal(nearest(values), want)


@EACH
def test_jax_reads_the_same_bits(name: str) -> None:
    coded, decoded = both(hard_rows(), name)
    np.testing.assert_array_equal(read(coded, name), decoded)


@EACH
def test_bytes_and_rows(name: str) -> None:
    spec, decoded = jax.eval_shape(lambda rows: both(rows, name), jax.ShapeDtypeStruct((0, 256), jnp.float32))
    assert (spec.words.shape, spec.scale.shape) == ((0, 256 if name == "mxfp8" else 128), (0, 256 // BLOCK[name]))
    assert {a.dtype for a in spec[:2]} == {np.dtype(np.uint8)} and decoded.shape == (0, 256)
    with pytest.raises(
        ValueError, match=rf"rows of {name} are whole blocks of {BLOCK[name]} entries, got 40: pad them"
    ):
        kernels.to_microscaled(np.zeros((1, 40), np.float32), name)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"format must be one of 'mxfp8', 'mxfp4', 'nvfp4', got 'mxfp6'; did you mean"):
        kernels.to_microscaled(np.zeros((1, 32), np.float32), "mxfp6")
