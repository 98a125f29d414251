"""Quantizers against NumPy replays of many steps, momentum after them, with everything that is kept compared."""

import numpy as np
import pytest

import gradcomp_jax as gc

from .replay.averaging import Averaging
from .replay.quantizer_codes import FixedPoint, Float8, Integers, MeanMagnitude, Means, PowersOfTwo, Rotated, Vote
from .replay.quantizer_runs import AXIS, N, nothing_is_lost, replay, wide

SHAPES = {"bias": (7,), "kernel": (3, 3, 4, 5), "matrix": (36, 11), "other": (30, 7)}
# Rows of 1024 entries.
LARGE = {"bias": (7,), "kernel": (3, 3, 16, 17), "matrix": (60, 50)}
SERVER = gc.collectives.TwoPhase("server")
COMMON = {"axis_name": AXIS}


def averaging(code, *, collective: str = "two_phase", block: int = 64, shapes=SHAPES, **options) -> Averaging:
    return Averaging(code, shapes, N, block=block, collective=collective, **options)


def keeping(code, *, collective: str = "two_phase", remainder: str = "put_back", **options) -> Averaging:
    return averaging(code, collective=collective, remainder=remainder, memory=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["two_phase", "all_gather"])
@pytest.mark.parametrize("block", [0, 64], ids=["column", "block"])
def test_one_bit_sgd(block: int, collective: str) -> None:
    """Columns of 36 entries, of two tensors, and of 30; quantized twice, with what either loses in the workers' memory."""
    options = {"granularity": "block", "block": block} if block else {}
    replay(
        gc.one_bit_sgd(collective=collective, **options, **COMMON), keeping(Means(), block=block, collective=collective)
    )


@pytest.mark.parametrize("collective", ["two_phase", "all_gather"])
def test_ef_sign_sgd(collective: str) -> None:
    replay(gc.ef_sign_sgd(block=64, collective=collective, **COMMON), keeping(MeanMagnitude(), collective=collective))


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["two_phase", "all_gather"])
def test_sign_sgd(collective: str) -> None:
    """Four voters tie often: by lot at the owner, 0 by gather. What goes dense gives the sign of its mean."""
    replay(
        gc.sign_sgd(block=64, collective=collective, **COMMON), averaging(Vote(), collective=collective), then=np.sign
    )


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["two_phase", "all_gather"])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd(bits: int, norm: str, collective: str) -> None:
    """Buckets of 61 entries do not fill their bytes; owners round at random once more."""
    code = Integers(bits, norm, draws="uniform" if bits == 8 else "planes")
    replay(
        gc.qsgd(bits=bits, norm=norm, bucket_size=61, collective=collective, **COMMON),
        averaging(code, block=61, collective=collective),
    )


@pytest.mark.slow
def test_qsgd_of_four_workers_takes_two_phases_and_threefry_draws() -> None:
    code = Integers(4, draws="threefry")
    replay(gc.qsgd(bucket_size=64, generator="threefry", **COMMON), averaging(code))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "fraction_bits", "collective"), [(16, 12, "two_phase"), (8, 5, "two_phase"), (8, 6, "all_gather")]
)
def test_stochastic_rounding(bits: int, fraction_bits: int, collective: str) -> None:
    """Among them values beyond the range of eight bits: from -4 to 4 with a fraction of five, from -2 to 2 with six."""
    method = gc.stochastic_rounding(bits=bits, fraction_bits=fraction_bits, collective=collective, **COMMON)
    replay(method, averaging(FixedPoint(bits, fraction_bits), block=1024, shapes=LARGE, collective=collective))


@pytest.mark.parametrize("collective", ["two_phase", "all_gather"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_scaled_with_residual(format: str, collective: str) -> None:
    replay(
        gc.fp8(format=format, block=64, collective=collective, **COMMON),
        keeping(Float8(format, True), collective=collective),
    )


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_fp8_without_residual(format: str, scaled: bool) -> None:
    """Plain casts of what is too small for the format, and of what is too large."""
    method = gc.fp8(format=format, block=64, scaled=scaled, error_feedback=False, **COMMON)
    oracle = averaging(Float8(format, scaled))
    replay(method, oracle) if scaled else replay(method, oracle, draw=wide)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("collective", ["two_phase", "all_gather", SERVER], ids=["two_phase", "all_gather", "server"])
def test_block_quantized(bits: int, collective) -> None:
    """What the downlink's rounding takes goes back to the workers, or into the owners' next mean."""
    how = {"remainder": "server"} if collective is SERVER else {"collective": collective}
    replay(gc.block_quantized(bits=bits, block=64, collective=collective, **COMMON), keeping(Integers(bits), **how))


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["two_phase", "all_gather"])
def test_block_quantized_to_powers_of_two(collective: str) -> None:
    method = gc.block_quantized(bits=4, format="e3m0", block=64, collective=collective, **COMMON)
    replay(method, keeping(PowersOfTwo(), collective=collective))


def test_block_quantized_without_residual() -> None:
    replay(gc.block_quantized(block=64, error_feedback=False, **COMMON), averaging(Integers(8)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "collective"),
    [(1, "two_phase"), (1, "all_gather"), (2, "two_phase"), (3, "all_gather"), (4, "all_gather")],
)
def test_eden_unbiased(bits: int, collective: str) -> None:
    """Every worker's own rotations, and the owners' common ones."""
    replay(
        gc.eden(bits=bits, block=64, collective=collective, **COMMON),
        averaging(Rotated.of(bits, unbiased=True), collective=collective),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "collective"), [(1, "all_gather"), (2, "all_gather"), (3, "two_phase"), (4, "two_phase")]
)
def test_eden_with_residual(bits: int, collective: str) -> None:
    """The scale of the least error."""
    method = gc.eden(bits=bits, block=64, error_feedback=True, collective=collective, **COMMON)
    replay(method, keeping(Rotated.of(bits, unbiased=False), collective=collective))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 2])
def test_eden_of_few_bits_loses_nothing_in_two_phases(bits: int) -> None:
    """Terms of few magnitudes cancel in many entries: whether such a mean is zero is rounding's to say, but once for all."""
    nothing_is_lost(gc.eden(bits=bits, block=64, error_feedback=True, collective="two_phase", **COMMON), SHAPES)
