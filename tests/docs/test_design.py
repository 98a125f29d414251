"""What one update enters: the design's reading list, and not more files and lines than this."""

import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gradcomp_jax as gc

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "gradcomp_jax"
TABLE = re.compile(r"^\| `((?:core|collectives|compressors|memory)/\w+\.py)` \|", re.MULTILINE)
TRACED = {gc.dgc: (34, 1_700), gc.dense: (21, 560)}
"""Most files and lines of functions that tracing one update enters, after ``init``. These numbers may fall."""


def reading_list() -> list[str]:
    return TABLE.findall((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))


def entered(tx: Any) -> dict[str, set[int]]:
    """The lines of all functions that tracing an update of a matrix and a vector on 8 workers enters, by file."""
    params = {"kernel": jnp.ones((256, 512)), "bias": jnp.ones(512)}
    state = jax.eval_shape(
        lambda each: jax.vmap(lambda _: tx.init(params), axis_name="data", axis_size=8)(each), jnp.zeros(8)
    )
    gradients = jax.tree.map(lambda p: jax.ShapeDtypeStruct((8, *p.shape), p.dtype), params)
    found: dict[str, set[int]] = {}

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
            name = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
            found.setdefault(name, set()).update(range(code.co_firstlineno, last + 1))

    update = jax.vmap(lambda gradient, state: tx.update(gradient, state, params), axis_name="data")
    sys.setprofile(note)
    try:
        jax.make_jaxpr(update)(gradients, state)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("method", TRACED, ids=lambda method: method.__name__)
def test_an_update_enters_few_files_and_lines(method: Callable[..., Any]) -> None:
    found = entered(method(axis_name="data"))
    files, lines = len(found), sum(map(len, found.values()))
    print(f"{method.__name__}: {files} files, {lines} lines")
    most_files, most_lines = TRACED[method]
    assert files <= most_files and lines <= most_lines


def test_an_update_enters_the_files_of_the_list_their_helpers_and_no_others() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    helpers = re.findall(r"`(\w+/\w+\.py)`", design.partition("\nHelpers: ")[2].partition(" and of layer 0")[0])
    assert len(reading_list()) >= 8 and len(helpers) >= 8
    # Layer 0 has no folder.
    found = {name for name in entered(gc.dgc(axis_name="data")) if "/" in name and not name.startswith("kernels/")}
    assert found == {*reading_list(), *helpers}


WORDS = re.compile(r"barrier|platform_dependent|on_tpu|on_cpu|on_gpu|are_there|\bXLA\b|\b[CGT]PU\b")
"""Names of what compilers are told."""


def test_only_passes_speaks_of_compilers() -> None:
    core = [path for path in sorted((PACKAGE / "core").glob("*.py")) if path.name != "passes.py"]
    assert len(core) > 10
    assert not [path.name for path in core if WORDS.search(path.read_text(encoding="utf-8"))]
