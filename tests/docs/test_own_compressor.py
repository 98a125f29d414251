"""docs/own_compressor.md: its code runs as written and does what the page says."""

import inspect
import pathlib
import re

import numpy as np
import pytest

import gradcomp_jax as gc

# The page calls what it shows without jit, so every operation is a program of its own: 138 of them.
pytestmark = pytest.mark.slow

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own_compressor.md"


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the page's code leaves."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_updates_are_the_mean_to_half_precision(page) -> None:
    gradients = np.asarray(page["gradients"], np.float64)
    exact = gradients[0].mean(axis=0)
    np.testing.assert_allclose(page["updates"][0], exact, atol=2.0**-10 * np.abs(gradients[0]).max())
    assert (page["updates"][0] != exact.astype(np.float32)).any()


def test_what_is_sent_and_what_is_kept_make_what_there_was(page) -> None:
    total = np.asarray(page["gradients"], np.float64).mean(axis=1).sum(axis=0)
    kept = np.asarray(page["kept"], np.float64)
    np.testing.assert_allclose(np.sum(page["updates"], axis=0, dtype=np.float64) + kept, total, atol=1e-5)
    # The memory matters: without it the books would not balance.
    assert np.abs(kept).max() > 1e-4
    assert int(page["state"].skipped[0]) == 0


def test_half_the_bytes_cross(page) -> None:
    assert page["full"].sent / 2 == pytest.approx(page["half"].sent, rel=0.01)


def test_it_is_as_short_as_it_looks(page) -> None:
    """Nothing but the two functions and the block."""
    own = {name for name, value in vars(page["HalfPrecision"]).items() if inspect.isfunction(value)}
    assert {name for name in own if not name.startswith("__")} == {"encode", "decode"}


def test_a_payload_that_does_not_lead_with_rows_is_refused(page) -> None:
    class WholeTensor(page["HalfPrecision"]):
        def encode(self, rows, state, info):
            return (rows.astype("float16"), abs(rows).max()), state

    tx = gc.exchange(WholeTensor(), axis_name="data", collective="two_phase")
    with pytest.raises(ValueError, match=r"WholeTensor\.encode was given 32 rows and returned float32\[\]"):
        gc.lower_update(page["params"], tx, page["mesh"])
