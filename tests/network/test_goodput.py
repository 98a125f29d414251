"""The goodput benchmark: its rows, tables and what is left to measure; and one run from end to end, faults included."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import gradcomp_jax as gc
from benchmarks import lab
from benchmarks.pages import write_between
from benchmarks.sweep.tasks import TASKS
from benchmarks.world import faults, goodput
from benchmarks.world.strategies import EVERY, GOODPUT, STRATEGIES, steps_of

ROOT = pathlib.Path(__file__).parents[2]
STREAMING = "streaming DiLoCo int4, H = 100"


def results(*cells: tuple) -> dict:
    """Cells of strategy, rate, delay and the seconds of a step."""
    made = [{"strategy": n, "rate": r, "delay_s": d, "steps_s": list(s)} for n, r, d, s in cells]
    return {"workers": 4, "batch": 32, "cells": made, "faults": []}


def test_every_strategy_is_a_step() -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    # What both tables call by one name is one strategy.
    assert all(EVERY[name] == one for table in (STRATEGIES, GOODPUT) for name, one in table.items())
    for strategy in EVERY.values():
        tx, step, replicas = steps_of(strategy, TASKS["tiny"], mesh)
        assert callable(tx.update) and callable(step)
        # Where a mean is late replicas differ meanwhile.
        assert replicas == (strategy.outer or strategy.delay > 0)
        assert isinstance(step, gc.training.OverlappedStep) == (strategy.delay > 0)
    assert set(goodput.LOW) <= set(GOODPUT)


@pytest.mark.parametrize(("slow", "share", "verdict"), [(0.111, "90%", "pass"), (0.112, "89%", "fail")])
def test_the_share_is_of_the_same_strategy_over_no_limits(slow: float, share: str, verdict: str) -> None:
    found = results(
        (STREAMING, *goodput.SLOW, (slow, slow)),
        (STREAMING, *goodput.FREE, (0.1, 0.1)),
        ("dense float32", *goodput.SLOW, (3.2, 3.2)),
    )
    head, _, row, dense = goodput.table(found)
    # The unshaped link comes first in the table, though it is measured last.
    assert head == "| strategy | unshaped, 0 ms | 20 Mbit/s, 90 ms |"
    rate = 4 * 32 / slow
    assert row == f"| {STREAMING} | 1,280/s (1,280 .. 1,280) | {rate:,.0f}/s ({rate:,.0f} .. {rate:,.0f}), {share} |"
    assert dense == "| dense float32 | | 40/s (40 .. 40) |"
    assert f"**{verdict}**" in goodput.aim(found)


def test_a_step_that_is_done_again_counts_once() -> None:
    done = [(0, 0, 10.5), (1, 0, 11.0), (0, 1, 12.5), (0, 1, 15.0), (1, 1, 16.5)]
    assert faults.series(done, 10.0, 2.0) == {"seconds": 6.5, "bin_s": 2.0, "steps": [2, 1, 0, 1]}


def test_faults_are_shares_of_the_run_to_which_nothing_happens() -> None:
    runs = {
        faults.NOTHING: {"seconds": 4.0, "bin_s": 2.0, "steps": [4, 4]},
        faults.PAUSED: {"seconds": 5.0, "bin_s": 2.0, "steps": [4, 0, 4], "hit_s": 2.0, "pause_s": 1.0},
        faults.GONE: {
            **{"seconds": 8.5, "bin_s": 2.0, "steps": [4, 0, 0, 0, 4]},
            **{"hit_s": 2.0, "ended_s": 0.5, "back_s": 4.5, "lost_steps": 3},
        },
    }
    found = results() | {"faults": [{"strategy": "a", "fault": fault, **run} for fault, run in runs.items()]}
    text = "\n".join(faults.tables(found))
    assert "| a | nothing | 4.0 s | 64/s | 100% |" in text
    assert "| a | one paused | 5.0 s | 51/s | 80% |" in text
    assert "| a | one gone and back | 8.5 s | 30/s | 47% |" in text
    assert "killed after 2.0 s; 0.5 s later all had ended, 4.5 s after the kill" in text and "3 steps were done" in text
    rows = text.splitlines()[-5:]
    assert rows[1:] == [
        "| 2 .. 4 | 64 | 0 | 0 |",
        "| 4 .. 6 | | 64 | 0 |",
        "| 6 .. 8 | | | 0 |",
        "| 8 .. 10 | | | 64 |",
    ]


def test_the_page_has_the_markers(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "world.md"
    page.write_text((ROOT / "docs" / "world.md").read_text())
    write_between(page, "goodput", "a table")
    assert "<!-- goodput -->\n\na table\n\n<!-- /goodput -->" in page.read_text()


@pytest.mark.network
@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))
def test_end_to_end(tmp_path: pathlib.Path) -> None:
    kept, page = tmp_path / "goodput.json", tmp_path / "page.md"
    page.write_text("<!-- goodput -->\n<!-- /goodput -->\n")
    words = ["--quick", "--json", str(kept), "--resume", "--write", str(page)]
    command = [sys.executable, str(ROOT / "benchmarks" / "goodput.py"), *words]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(kept.read_text())
    by = {(c["strategy"], c["rate"]): min(c["steps_s"]) for c in found["cells"]}
    # Every dense step waits for two phases; a late outer step waits once in many.
    assert by["dense bfloat16", 2e7] > 0.18
    assert by[STREAMING, 2e7] < by["dense bfloat16", 2e7] / 4
    runs = {f["fault"]: f for f in found["faults"]}
    assert set(runs) == set(faults.FAULTS)
    # All workers take every step of every run, whatever happened on the way.
    assert len({sum(run["steps"]) for run in runs.values()}) == 1
    assert runs[faults.GONE]["lost_steps"] >= 1
    assert runs[faults.GONE]["back_s"] > runs[faults.GONE]["ended_s"] > 0
    assert "one gone and back" in page.read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert again.returncode == 0 and "s a step" not in again.stdout
