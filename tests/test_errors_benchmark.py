"""Laws of the error table: no code beats the bound, unbiased codes average out, more bits are less error."""

import importlib
import inspect
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from gradcomp_jax import compressors

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
SIDE = 64


@pytest.fixture(scope="module")
def errors():
    """The script, which finds its neighbours beside it."""
    before = set(sys.modules)
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("errors")
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in set(sys.modules) - before:
            if str(SCRIPTS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture(scope="module")
def on_gaussian(errors: ModuleType):
    tensors = errors.gaussian(2, SIDE)
    return {code.name: errors.measure(code, tensors) for code in errors.CODES}


def codes_of(errors: ModuleType, family: str) -> list:
    return [code for code in errors.CODES if code.family == family]


def test_every_compressor_is_measured(errors: ModuleType) -> None:
    kinds = {type(code.make((SIDE, SIDE))).__name__ for code in errors.CODES}
    public = {name for name, made in vars(compressors).items() if inspect.isfunction(made)} - {"nbytes"}
    assert kinds == {name.title().replace("_", "").replace("Topk", "TopK") for name in public}
    assert len({code.name for code in errors.CODES}) == len(errors.CODES)


def test_nothing_beats_the_bound(errors: ModuleType, on_gaussian) -> None:
    for name, measured in on_gaussian.items():
        for bits, error in zip(measured.bits, measured.errors, strict=True):
            assert error > 4.0**-bits, name


def test_more_bits_are_less_error(errors: ModuleType, on_gaussian) -> None:
    families = {code.family for code in errors.CODES if code.ordered}
    compared = 0
    for family in families:
        points = sorted((on_gaussian[c.name] for c in codes_of(errors, family)), key=lambda one: one.mean_bits)
        for fewer, more in itertools.pairwise(points):
            assert fewer.mean_bits < more.mean_bits
            assert fewer.mean > more.mean, family
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    "family", ("integers, max, stochastic", "integers, l2, stochastic", "rotated, unbiased", "random-k, rescaled")
)
def test_unbiased_codes_average_out(errors: ModuleType, family: str) -> None:
    code = codes_of(errors, family)[1]
    compressor = code.make((SIDE, SIDE))
    assert compressor.unbiased
    (x,) = errors.gaussian(1, SIDE)
    many = 40
    draws = [np.asarray(errors.round_trip(compressor, x, jax.random.key(i)), np.float64) for i in range(many)]
    each = np.mean([errors.normalised_error(one, x) for one in draws])
    together = errors.normalised_error(np.mean(draws, axis=0), x)
    np.testing.assert_allclose(together, each / many, rtol=0.25)


def test_biased_codes_do_not(errors: ModuleType) -> None:
    compressor = codes_of(errors, "rotated, biased")[0].make((SIDE, SIDE))
    (x,) = errors.gaussian(1, SIDE)
    draws = [np.asarray(errors.round_trip(compressor, x, jax.random.key(i)), np.float64) for i in range(40)]
    each = np.mean([errors.normalised_error(one, x) for one in draws])
    # What the least-squares scale shrinks by is the error itself, and its square is left of any mean.
    assert errors.normalised_error(np.mean(draws, axis=0), x) > 0.9 * each**2


def test_as_published(errors: ModuleType, on_gaussian) -> None:
    for bits, published in errors.PUBLISHED.items():
        unbiased = on_gaussian[f"rotated, {bits} bits, unbiased"].mean
        biased = on_gaussian[f"rotated, {bits} bits, biased"].mean
        np.testing.assert_allclose(unbiased, published, rtol=0.05)
        # Of other rotations, one and two: each mean has the noise of so few blocks.
        np.testing.assert_allclose(unbiased, biased / (1 - biased), rtol=0.05)
    assert errors.ternary_expected(2.5) == pytest.approx(1.01, abs=0.005)
    assert on_gaussian["ternary, clip 2.5, by tensor"].mean == pytest.approx(errors.ternary_expected(2.5), rel=0.05)


def test_what_the_page_says_holds(on_gaussian) -> None:
    ternary = on_gaussian["ternary, clip 2.5, by tensor"]
    rotated = on_gaussian["rotated, 1 bits, unbiased"]
    assert rotated.mean_bits < ternary.mean_bits
    assert rotated.mean < ternary.mean
    for bits in (2, 4, 8):
        name = f"block_quantized, {bits} bits, {{}}, stochastic"
        assert on_gaussian[name.format("max")].mean < on_gaussian[name.format("l2")].mean
    assert on_gaussian["topk, 0.01, bfloat16"].mean > 0.8


def test_heavy_tails_are_heavy_and_of_unit_length(errors: ModuleType) -> None:
    (normal,), (heavy,) = errors.gaussian(1, 256), errors.heavy_tailed(1, 256)
    for x in (normal, heavy):
        assert x.dtype == np.float32
        assert np.mean(np.square(x, dtype=np.float64)) == pytest.approx(1)
    assert np.abs(heavy).max() > 3 * np.abs(normal).max()


def test_gradients_of_training(errors: ModuleType) -> None:
    tensors = errors.gradients(1, [1])
    assert [x.shape for x in tensors] == [(512, 64), (3, 3, 16, 32)]
    for x in tensors:
        assert np.mean(np.square(x, dtype=np.float64)) == pytest.approx(1)
    dense = tensors[0]
    # Eight examples, so rank eight at most.
    assert np.linalg.matrix_rank(dense, tol=1e-4 * np.linalg.norm(dense, 2)) <= 8


def test_page_and_picture(errors: ModuleType, on_gaussian, tmp_path: Path) -> None:
    table = {name: dict.fromkeys(("Gaussian", "Student t", "gradients"), one) for name, one in on_gaussian.items()}
    errors.plot(errors.CODES, table, tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    text = errors.page(
        table,
        command="python benchmarks/errors.py",
        seeds=2,
        side=SIDE,
        steps=[22],
        tensors=errors.gaussian(2, SIDE),
        image="errors.png",
    )
    for code in errors.CODES:
        assert f"| {code.name} |" in text
    assert "![Error against bits for each value](errors.png)" in text
    assert re.search(r"^Machine: .*\.\nVersions: .*jax [\d.]+.*\.\n$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1009.3, "1010"), (99.96, "100"), (1.0, "1.00"), (0.00135, "0.00135"), (0.0009996, "0.00100")],
)
def test_numbers(errors: ModuleType, value: float, text: str) -> None:
    assert errors.number(value) == text
    assert errors.number(2.768e-6) == "2.77e-6"
    assert errors.number(0.340, digits=2) == "0.34"
