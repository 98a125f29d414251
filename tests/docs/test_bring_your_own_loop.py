"""The page's loops, run as they are written: they send less than before, and all of them end with the same losses."""

import difflib
import functools
import pathlib
import re
from typing import Any

import numpy as np
import optax
import pytest

import gradcomp_jax as gc

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "bring_your_own_loop.md").read_text()
LOOPS = ("shard-map", "plain-jit", "flax-nnx", "linen", "equinox", "pmap")
EXCHANGES = {
    "dgc": None,
    "terngrad": lambda: gc.terngrad(axis_name="data", bucket_size=64),
}
BLOCK = re.compile(r"<!-- ([\w-]+) -->\n```python\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.standard_promotion


def section(anchor: str) -> dict[str, str]:
    """The marked blocks of the section whose heading has this anchor."""
    for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if text.partition("\n")[0].lower().replace(" ", "-") == anchor:
            return dict(BLOCK.findall(text))
    raise AssertionError(f"the page has no section {anchor!r}")


def setup(exchange: str) -> dict[str, Any]:
    """The names that all blocks share, with another exchange in the place of the page's."""
    space: dict[str, Any] = {}
    exec(dict(BLOCK.findall(PAGE))["setup"], space)
    if EXCHANGES[exchange] is not None:
        space["exchange"] = EXCHANGES[exchange]()
        space["chain"] = optax.chain(space["exchange"], space["optimizer"])
    return space


def run(block: str, exchange: str) -> list[float]:
    space = setup(exchange)
    exec(block, space)
    return space["losses"]


@functools.cache
def expected(exchange: str) -> list[float]:
    """What the library's own step makes of it; ``dense`` is plain jit before the change."""
    if exchange == "dense":
        return run(section("plain-jit")["before"], "dgc")
    return run(section("the-train-step")["train-step"], exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("loop", LOOPS)
def test_all_loops_train_alike(loop: str, exchange: str) -> None:
    if loop == "equinox":
        pytest.importorskip("equinox", reason="equinox is not installed: pip install -e '.[test]'")
    losses = run(section(loop)["after"], exchange)
    np.testing.assert_allclose(losses, expected(exchange), rtol=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("loop", LOOPS)
def test_all_of_them_trained_alike_before(loop: str) -> None:
    if loop == "equinox":
        pytest.importorskip("equinox", reason="equinox is not installed: pip install -e '.[test]'")
    np.testing.assert_allclose(run(section(loop)["before"], "dgc"), expected("dense"), rtol=1e-4)


def test_plain_jit_sends_less_than_before() -> None:
    sent = {}
    for form, block in section("plain-jit").items():
        if form in ("before", "after"):
            space = setup("dgc")
            exec(block, space)
            sent[form] = gc.wire_bytes(
                space["step"].lower(space["params"], space["opt_state"], space["placed"]).compile()
            )
    assert sent["after"].sent < sent["before"].sent / 3
    assert "all-reduce" in sent["before"].by("kind")


def test_typed_gradients() -> None:
    np.testing.assert_allclose(run(section("plain-jit")["typed"], "dgc"), expected("dgc"), rtol=1e-4)


@pytest.mark.parametrize("name", ("options", "narrow"))
def test_the_train_steps_options(name: str) -> None:
    space = setup("dgc")
    exec(section("the-train-step")[name], space)
    assert float(space["metrics"]["skipped"]) == 0 and np.isfinite(float(space["metrics"]["loss"]))


@pytest.mark.parametrize("loop", LOOPS)
def test_the_table_counts_the_lines(loop: str) -> None:
    """Changed: lines of yours that are gone or another; new: what the loop is longer by."""
    blocks = section(loop)
    before, after = (blocks[form].splitlines() for form in ("before", "after"))
    diff = list(difflib.ndiff(before, after))
    gone = sum(line.startswith("- ") for line in diff)
    new = max(0, sum(line.startswith("+ ") for line in diff) - gone)
    row = next(line for line in PAGE.splitlines() if line.startswith("|") and f"(#{loop})" in line)
    assert [int(cell) for cell in row.strip("| ").split("|")[1:]] == [gone, new]
