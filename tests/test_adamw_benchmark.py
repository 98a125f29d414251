"""What goes before AdamW: which runs there are, how they go on, and what the tables make of them."""

import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.adamw import decision, goals, plot, runs, table, task, train
from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.task import Decoder, Task
from benchmarks.adamw.train import Run

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

DENSE, SPARSE = table.BASELINE, "top-k 0.01, b1=0"


def result(run: Run, loss: float) -> dict[str, Any]:
    said = {"run": dataclasses.asdict(run), "validation": loss, "test": loss + 0.01, "seconds": 1800, "processor": "a"}
    return said | {"versions": {"jax": "1"}}


TASK = task.TASKS["65k-1"]


def found(of: dict[str, float]) -> runs.Results:
    """Results of methods whose gap to a dense run of 2 bits is given; the third rate is the best."""
    made = {}
    for name, gap in of.items():
        rates = ROWS[name].rates
        for rate in rates:
            run = Run(name, rate, TASK.tuned_at, 0)
            made[run.name] = result(run, 3 + abs(rate - rates[2]))
        for steps in TASK.lengths:
            for seed in runs.SEEDS:
                run = Run(name, rates[2], steps, seed)
                dense = 2 + 100 / steps + 0.01 * seed
                made[run.name] = result(run, (dense + 0.01) * (1 + gap + (1e-4 * seed if gap else 0)) - 0.01)
    return runs.Results(TASK, made)


def test_a_row_is_tuned_before_it_has_other_runs() -> None:
    first = list(runs.wanted([DENSE, SPARSE], runs.Results(TASK)))
    assert [run.rate for run in first] == [*ROWS[DENSE].rates[2:4], *ROWS[SPARSE].rates[2:4]]
    assert {(run.steps, run.seed) for run in first} == {(TASK.tuned_at, 0)}
    later = [run for run in runs.wanted([DENSE], found({DENSE: 0.0})) if (run.steps, run.seed) != (TASK.tuned_at, 0)]
    assert {run.rate for run in later} == {ROWS[DENSE].rates[2]}
    assert {(run.steps, run.seed) for run in later} >= {(n, seed) for n in TASK.lengths for seed in runs.SEEDS[1:]}


def test_rates_are_tried_until_the_best_has_worse_ones_on_both_sides() -> None:
    made, rates = runs.Results(TASK), ROWS[DENSE].rates
    tried = []
    while left := runs.rates_left(DENSE, ROWS[DENSE], made):
        assert runs.best_rate(DENSE, ROWS[DENSE], made) is None
        for rate in left:
            run = Run(DENSE, rate, TASK.tuned_at, 0)
            made.runs[run.name] = result(run, abs(rate - rates[1]))
            tried.append(rate)
    assert tried == [rates[2], rates[3], rates[1], rates[0]]
    assert runs.best_rate(DENSE, ROWS[DENSE], made) == rates[1]


def test_a_run_that_diverged_is_never_the_best() -> None:
    made, rates = runs.Results(TASK), ROWS[DENSE].rates
    for number, rate in enumerate(rates):
        run = Run(DENSE, rate, TASK.tuned_at, 0)
        made.runs[run.name] = result(run, math.nan if number % 2 else 3.0 - number)
    assert runs.best_rate(DENSE, ROWS[DENSE], made) == rates[4]


def test_gaps_are_those_of_the_same_seed_and_p_is_of_a_t_test() -> None:
    both = found({DENSE: 0.0, SPARSE: 0.005})
    gaps = table.gaps(SPARSE, 16_000, both)
    np.testing.assert_allclose(gaps, [0.005, 0.0051, 0.0052], atol=1e-9)
    # Three gaps around 0.0051 with a deviation of 1e-4: t = (0.0051 - 0.01) / (1e-4 / sqrt(3)).
    assert 0 < table.p_no_worse(gaps) < 1e-3 < 0.999 < table.p_no_worse([0.02, 0.0201, 0.0202])
    assert math.isnan(table.p_no_worse([0.1]))


def test_the_table_of_what_to_take_has_the_figures_of_its_pages() -> None:
    both = found({DENSE: 0.0, "sparse_adamw, 0.01": 0.005})
    text = decision.table(both, {"sparse_adamw, 0.01": 79.46}, decision.ROOT / "docs" / "methods" / "index.md")
    (line,) = [line for line in text.splitlines() if "sparse_adamw" in line]
    assert "| 79.5x | [+0.51% bits per character after 16,000 steps, 3 seeds](../results/protocol.md) |" in line
    # Those of other pages are there; rows without runs are not.
    assert "](../results/cifar10.md)" in text and "int4" not in text and 3 <= len(text.splitlines()) <= 10
    for page in ("README.md", "docs/methods/index.md"):
        rows = (decision.ROOT / page).read_text().split("<!-- decision-table -->")[1].split("<!--")[0].split("](")
        assert len(rows) > 4 and all((decision.ROOT / page).parent.joinpath(r.split(")")[0]).exists() for r in rows[1:])


def test_a_goal_is_met_by_a_small_gap_of_enough_seeds() -> None:
    fewer = {DENSE: 0.5, SPARSE: 60.0}
    verdicts = {}
    for gap in (0.001, 0.004, 0.03):
        rows = [row for row in goals.goals(found({DENSE: 0.0, SPARSE: gap}), fewer).splitlines() if SPARSE in row]
        verdicts[gap] = [row.split("|")[-2].strip() for row in rows]
    # At least 10 times fewer without a gap, 50 times within 0.2%, 40 times within 1.5% of fewer steps.
    assert verdicts == {
        0.001: ["missed", "met", "met"],
        0.004: ["missed", "missed", "met"],
        0.03: ["missed", "missed", "missed"],
    }
    assert "not run" in goals.goals(found({DENSE: 0.0}), fewer)


def test_the_table_and_the_pictures() -> None:
    both = found({DENSE: 0.0, SPARSE: 0.005})
    sizes = {DENSE: {"sent": 400.0, "payload": 400.0}, SPARSE: {"sent": 4.0, "payload": 2.0}}
    text = table.table(both, sizes, {"sent": 200.0, "payload": 200.0})
    row = next(line for line in text.splitlines() if SPARSE in line)
    assert "50x | 100x" in row and "+0.51 ± 0.01%" in row
    assert f"{len(both.runs)} runs, {len(both.runs) / 2:.1f} CPU hours on a; jax 1" in table.measured(both)
    fewer = {DENSE: 0.5, SPARSE: 50.0}
    assert plot.frontier(both, fewer, 16_000) == [DENSE, SPARSE]
    for picture in (plot.gap_by_bytes(both, fewer, (16_000, 4_000), "t"), plot.gap_by_steps(both, [SPARSE], "t")):
        assert picture.startswith(b"\x89PNG")


def test_names_of_close_points_do_not_cover_each_other() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    plot._write_names(axes, [(f"method {x}", x, 5.0, "k") for x in (5.0, 5.1, 5.2)], [[(5.0, 5.0), (5.2, 5.0)]])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", (SPARSE, "outer average in int4 every 9, 0.7/0.9"))
def test_a_run_goes_on_where_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(0).integers(0, 7, 4096).astype(np.uint8)
    monkeypatch.setitem(task.MODELS, "65k", Decoder(8, 1, 2, 8))
    monkeypatch.setattr(train, "vocabulary", lambda name: 7)
    for module in (train, task):
        monkeypatch.setattr(module, "parts", lambda name: dict.fromkeys(("train", "validation", "test"), text))
    monkeypatch.setattr(task, "JUDGED", 64 * 8)
    run, of = Run(name, 1e-2, 300, 0), Task("65k", 1)
    whole = train.train(of, run, ROWS[name], tmp_path / "whole", until=time.time() + 1e4)
    assert whole is not None and len(whole["train"]) == 3
    for _ in range(2):
        assert train.train(of, run, ROWS[name], tmp_path / "parts", until=0.0) is None
    again = train.train(of, run, ROWS[name], tmp_path / "parts", until=0.0)
    assert again is not None
    for same in ("validation", "test", "train"):
        assert json.dumps(again[same]) == json.dumps(whole[same]), same
