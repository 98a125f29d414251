"""Formats of matrix units in an exchange: small blocks are kept, and what is not finite is seen in the payload alone."""

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.compressors import RowInfo, block_quantized

FORMATS = ("mxfp8", "mxfp4", "nvfp4")
CODES = {name: block_quantized(format=name) for name in FORMATS}
TINY = float(np.finfo(np.float32).tiny)


@jax.jit
def exchanged(x):
    """By format, what is sent and what is kept of one worker's gradient."""
    found = {}
    for name, code in CODES.items():
        tx = gc.exchange(code, axis_name=None, mask=True)
        update, state = tx.update({"x": x}, tx.init({"x": x}))
        found[name] = update["x"], state.memory[0][0].value.reshape(-1)[: x.size].reshape(x.shape), state.skipped
    return found


def test_sent_and_kept_are_the_gradient_whatever_its_size() -> None:
    x = np.random.default_rng(0).normal(size=(38, 256)).astype(np.float32)
    x[:36] *= np.float32(10.0) ** np.linspace(36, -39, 36, dtype=np.float32)[:, None]  # the last are subnormal
    x[36], x[37, ::3] = -0.0, 1e30
    for name, (sent, kept, skipped) in jax.tree.map(np.asarray, exchanged(x)).items():
        assert not skipped
        np.testing.assert_allclose(sent.astype(np.float64) + kept, x, rtol=1e-6, atol=TINY, err_msg=name)
        assert sent[:32].any(axis=1).all() and sent[37, ::3].all()
        # Entries of 1e-37 have no scale in these two: they are kept, and sent once they have grown.
        if name != "mxfp4":
            assert not sent[34].any()
            np.testing.assert_array_equal(kept[34], np.where(np.abs(x[34]) < TINY, 0, x[34]))


@jax.jit
def seen(x):
    """By format, whether the payload alone says that all is finite, as an owner reads it of its mean."""
    return {name: code.finite(code.encode(x, (), RowInfo())[0], None) for name, code in CODES.items()}


def test_an_owner_sees_what_is_not_finite() -> None:
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    assert all(seen(x).values())
    for bad in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[1, 77] = bad
        assert not any(seen(broken).values())


def test_a_format_has_its_own_bits_and_block() -> None:
    assert block_quantized() == block_quantized(bits=8, block=256) == block_quantized(format="int")
    assert block_quantized(format="e3m0") == block_quantized(format="e3m0", bits=4)
    for name, bits, block in (("mxfp8", 8, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16)):
        assert block_quantized(format=name, bits=bits, block=block) == CODES[name]
        assert gc.block_quantized(axis_name=None, format=name, bits=bits, block=block)


@pytest.mark.parametrize(("name", "bits"), [("mxfp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.625)])
def test_bits_on_the_wire(name: str, bits: float) -> None:
    params = {"w": jax.ShapeDtypeStruct((512, 512), np.float32)}
    traffic = gc.planning.traffic.read(lambda **axis: gc.block_quantized(format=name, **axis), params, workers=8)
    # To the owners and back, each 7/8 of a payload; and one word that says whether to skip.
    assert traffic.sent == pytest.approx(2 * 7 / 8 * bits * 512 * 512 / 8, rel=1e-4)
