"""Laws of the error table: no code beats the bound, unbiased codes average out, more bits are less error."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

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


def test_every_compressor_is_measured(errors: ModuleType) -> None:
    kinds = {type(code.make((SIDE, SIDE))).__name__ for code in errors.CODES}
    public = {name for name, made in vars(compressors).items() if inspect.isfunction(made)} - {"nbytes"}
    # One function makes codes of two kinds.
    assert kinds - {"MicroscaledFloat"} == {name.title().replace("_", "").replace("Topk", "TopK") for name in public}
    assert len({code.name for code in errors.CODES}) == len(errors.CODES)


def test_nothing_beats_the_bound(errors: ModuleType, on_gaussian) -> None:
    for name, measured in on_gaussian.items():
        for bits, error in zip(measured.bits, measured.errors, strict=True):
            assert error > 4.0**-bits, name


def test_as_published(errors: ModuleType, on_gaussian) -> None:
    for bits, published in errors.PUBLISHED.items():
        unbiased = on_gaussian[f"rotated, {bits} bits, unbiased"].mean
        biased = on_gaussian[f"rotated, {bits} bits, biased"].mean
        np.testing.assert_allclose(unbiased, published, rtol=0.05)
        # Of other rotations, one and two: each mean has the noise of so few blocks.
        np.testing.assert_allclose(unbiased, biased / (1 - biased), rtol=0.05)
    assert errors.ternary_expected(2.5) == pytest.approx(1.01, abs=0.005)
    assert on_gaussian["ternary, clip 2.5, by tensor"].mean == pytest.approx(errors.ternary_expected(2.5), rel=0.05)


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
