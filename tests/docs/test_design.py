"""The design's reading list is what an update runs through, and short enough to be read."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp

import gradcomp_jax as gc

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "gradcomp_jax"
TABLE = re.compile(r"^\| `((?:core|collectives|compressors|memory)/\w+\.py)` \|", re.MULTILINE)


def reading_list() -> list[str]:
    return TABLE.findall((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))


def test_an_update_is_read_in_few_lines() -> None:
    files = reading_list()
    lines = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in files)
    assert len(files) <= 12
    assert lines <= 1600, lines


def test_an_update_runs_through_every_file_of_the_list() -> None:
    tx = gc.dgc(axis_name="data")
    params = {"kernel": jax.ShapeDtypeStruct((64, 1024), jnp.float32), "bias": jax.ShapeDtypeStruct((7,), jnp.float32)}
    axis_env = [("data", 8)]
    state = jax.make_jaxpr(tx.init, axis_env=axis_env, return_shape=True)(params)[1]
    run: set[str] = set()

    def note(frame, event, argument) -> None:
        run.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        jax.make_jaxpr(tx.update, axis_env=axis_env)(params, state)
    finally:
        sys.setprofile(None)
    assert not {name for name in reading_list() if str(PACKAGE / name) not in run}
