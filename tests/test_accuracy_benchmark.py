"""The sweep of benchmarks/accuracy.py: its order, what it goes on with, and its tables; a run itself is marked slow."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.tasks import texts
from benchmarks.tasks.datasets import for_tuning
from benchmarks.tasks.recipes import RECIPES
from benchmarks.tasks.tasks import TASKS
from benchmarks.training import report, run
from benchmarks.training.cells import STUDIES, Cell, Row, Study
from gradcomp_jax import experiments
from gradcomp_jax._files import write_whole
from gradcomp_jax.experiments.problem import language_modelling

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

STUDY = Study("digits", {2: (Row("dense-bf16"), Row("diloco", 4), Row("diloco", 8))}, grid=(0.5, 1.0), seeds=2)


def result(cell: Cell, value: float | None, *, metric: str = "accuracy", sent: float = 100.0) -> dict:
    return {
        "task": "digits",
        "row": dataclasses.asdict(cell.row) if cell else {"method": "dense-bf16"},
        "workers": 2,
        "seed": cell.seed if cell else 0,
        "learning_rate": cell.learning_rate if cell else 0.1,
        "tuning": bool(cell and cell.tuning),
        "settings": {},
        "metric": metric,
        "evaluation": [value],
        "loss_of_ten_steps": [1.0],
        "wire": {"sent_mean": sent},
        "step_s": 0.1,
        "machine": {"cores": 2, "platform": "cpu"},
        "versions": {"jax": "0"},
    }


def all_found(study: Study) -> dict:
    """Every run of a study: the second rate is the better one, diloco is a little worse."""
    found = {}
    for _ in range(2):
        for cell in study.cells(found):
            value = 0.9 - 0.01 * (cell.row.method == "diloco") + 0.02 * (cell.learning_rate > 0.04) + 0.001 * cell.seed
            found.setdefault(cell.name, result(cell, value, sent=100.0 / (cell.row.every or 1)))
    return found


def test_every_study_names_what_there_is() -> None:
    for study in STUDIES.values():
        assert study.task in TASKS
        for workers, rows in study.rows.items():
            assert TASKS[study.task].settings.batch % workers == 0
            for row in rows:
                assert row.method in RECIPES
                assert row.tuned in study.tuned


def test_methods_are_tuned_and_then_run_with_a_seed_each_before_the_next_seed() -> None:
    tuning = list(STUDY.cells({}))
    assert [(cell.row.method, cell.learning_rate, cell.tuning) for cell in tuning] == [
        ("dense-bf16", 0.025, True),
        ("dense-bf16", 0.05, True),
        ("diloco", 0.025, True),
        ("diloco", 0.05, True),
    ]
    found = {cell.name: result(cell, cell.learning_rate) for cell in tuning}
    after = [cell for cell in STUDY.cells(found) if not cell.tuning]
    assert [(str(cell.row), cell.seed) for cell in after] == [
        (row, seed) for seed in (0, 1) for row in ("dense-bf16", "diloco-every-4", "diloco-every-8")
    ]
    assert {cell.learning_rate for cell in after} == {0.05}
    # A method that is not tuned yet waits.
    del found[tuning[-1].name]
    assert {cell.row.method for cell in STUDY.cells(found) if not cell.tuning} == {"dense-bf16"}


def test_the_table_has_means_spreads_and_what_is_missing() -> None:
    found = all_found(STUDY)
    lines = report.table(STUDY, found).splitlines()[2:]
    assert lines[0].startswith("| dense-bf16 | 2 | 1 | 92.05 ± 0.07 | +0.00 points | 100 | 1x | 0.05 | 2 |")
    assert lines[1].startswith("| diloco | 2 | 4 | 91.05 ± 0.07 | -1.00 points | 25 | 4x | 0.05 | 2 |")
    del found[next(name for name in found if name.startswith("diloco-every-8") and "seed-1" in name)]
    assert report.table(STUDY, found).splitlines()[4].endswith("| 0.05 | 1 |")
    assert "not run" in report.table(STUDY, {})
    some = {name: r for name, r in found.items() if not name.startswith("diloco-every-8") or "tuning" in name}
    assert "every-8" not in report.table(STUDY, some, missing=False) and not report.not_run(STUDY, found)
    assert report.not_run(STUDY, some) == "Not run so far: diloco-every-8 with 2 workers."
    assert "91.00" in report.tuning(STUDY, found) or "0.91" in report.tuning(STUDY, found)


def test_rates_close_to_the_best_are_run_to_the_end_and_the_validation_part_says_which_of_them_a_row_has() -> None:
    study = dataclasses.replace(STUDY, rows={2: (Row("dense-bf16"),)}, grid=(0.5, 1.0, 2.0), close=0.1)
    row, kinds, found = study.most[1][0], {"metric": "perplexity"}, {}
    for cell, value in zip(study.cells({}), (150.0, 130.0, 120.0), strict=True):
        assert cell.tuning and study.rate(row, found) is None
        found[cell.name] = result(cell, value, **kinds)
    last = [cell for cell in study.cells(found) if not cell.tuning]
    assert [(cell.learning_rate, cell.seed) for cell in last] == [(0.1, 0), (0.05, 0)]
    assert report.finals(study, found) == report.edges(study, found) == ""
    for cell, value in zip(last, (101.0, 99.0), strict=True):
        assert study.rate(row, found) is None
        # The test part would say the opposite.
        found[cell.name] = result(cell, 200.0 - value, **kinds) | {"validation": value}
    assert study.rate(row, found) == 0.05
    assert {(c.learning_rate, c.seed) for c in study.cells(found) if c.name not in found} == {(0.05, 1)}
    assert report.finals(study, found).endswith("went on: dense-bf16 101 at 0.1, 99 at 0.05.")
    assert "101.000" in report.table(study, found) and "99.000 at 0.1 (1 seed)" in report.at_other_rates(study, found)
    assert report.edges(study, found) == ""
    # A run that diverged is not taken.
    found[last[1].name]["validation"] = None
    assert study.rate(row, found) == 0.1 and "diverged at 0.05" in report.finals(study, found)
    assert report.edges(study, found).endswith("outside: dense-bf16.")
    # One rate alone needs no judgement.
    alone = dataclasses.replace(study, close=0.05)
    assert alone.rate(row, found) == 0.1 and report.finals(alone, found) == ""


@pytest.mark.slow
def test_the_last_state_of_a_run_is_judged_by_another_part(tmp_path) -> None:
    parts = (np.random.default_rng(i).integers(0, 11, 300).astype(np.uint16) for i in range(3))
    text = experiments.Text("penn-treebank", *parts, 11)
    make = functools.partial(language_modelling, texts.lstm, metric="perplexity", steps=2, judged=100)
    settings = dataclasses.replace(TASKS["penn-treebank"].settings, epochs=1)
    trainer = experiments.Trainer("dense-bf16", make(text, settings), settings)
    evaluation = experiments.train_with_checkpoints(trainer, 0, tmp_path).evaluation[-1]
    assert run.judged(trainer, 0, tmp_path, make(text, settings)) == evaluation
    other = run.judged(trainer, 0, tmp_path, make(for_tuning(text), settings))
    assert abs(other - evaluation) > 1e-3 * evaluation


def test_a_longer_row_has_the_rate_of_the_others_and_is_held_against_a_dense_one_as_long() -> None:
    dense, longer = Row("dense-bf16"), Row("dense-bf16", epochs=60)
    study = dataclasses.replace(STUDY, rows={2: (dense, longer, Row("diloco", 4, epochs=60))}, short=5)
    cells = {cell.name: cell for cell in study.cells(all_found(study))}
    assert study.tuned == ["dense-bf16", "diloco"] and len(cells) == 2 * 2 + 3 * 2
    assert cells["dense-bf16-epochs-60-workers-2-rate-0.05-seed-1"].settings().epochs == 60
    assert cells["dense-bf16-workers-2-rate-0.05-tuning"].settings().epochs == TASKS["digits"].settings.epochs // 5
    found = all_found(study)
    for seed in range(2):
        found[f"dense-bf16-workers-2-rate-0.05-seed-{seed}"]["evaluation"] = [0.5]
    lines = report.table(study, found).splitlines()[2:]
    assert lines[2].startswith("| diloco-epochs-60 | 2 | 4 | 91.05 ± 0.07 | -1.00 points |")


def test_the_page_and_its_picture(tmp_path) -> None:
    page = tmp_path / "page.md"
    other = Cell("digits", Row("terngrad"), 2, 0, 0.05)
    report.write("digits-replicas", STUDY, all_found(STUDY) | {other.name: result(other, 0.9)}, page)
    text = page.read_text()
    # The run of another study in the same folder is not among them.
    assert "## Tuning" in text and "10 runs" in text and "page.png" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    # With a panel for several numbers of workers, of which one has no run.
    report.plot(
        dataclasses.replace(STUDY, rows={**STUDY.rows, 4: STUDY.rows[2]}), all_found(STUDY), tmp_path / "two.png"
    )
    assert (tmp_path / "two.png").stat().st_size
    with pytest.raises(SystemExit, match="nothing was run"):
        report.write("digits-replicas", STUDY, {}, tmp_path / "none.md")
    assert not (tmp_path / "none.md").exists()


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch) -> None:
    tried = []

    def process(command, *, env, **options):
        cell = json.loads(env[run.MARK])
        tried.append(cell["row"]["method"])
        if cell["row"]["method"] == "diloco":
            raise subprocess.CalledProcessError(3, command)
        name = Cell(**{**cell, "row": Row(**cell["row"])}).name
        pathlib.Path(command[3], f"{name}.json").write_text(json.dumps(result(None, 0.9)))

    monkeypatch.setattr(subprocess, "run", process)
    assert not run.run_all(STUDY, tmp_path, tmp_path / "states", hours=1.0)
    assert tried.count("dense-bf16") == 4 and tried.count("diloco") == 2


def test_runs_at_once_have_cores_of_their_own_and_wait_for_rates(tmp_path, monkeypatch) -> None:
    tried, cores, running, most = [], set(), 0, 0

    def process(command, *, env, **options):
        nonlocal running, most
        running += 1
        most = max(most, running)
        cell = json.loads(env[run.MARK])
        name = Cell(**{**cell, "row": Row(**cell["row"])}).name
        tried.append(name)
        cores.add(command[-1])
        time.sleep(0.05)
        write_whole(pathlib.Path(command[3], f"{name}.json"), json.dumps(result(None, 0.9)))
        running -= 1

    monkeypatch.setattr(subprocess, "run", process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    assert run.run_all(STUDY, tmp_path, tmp_path / "states", hours=1.0, at_once=2)
    assert cores == {"0,2", "1,3"} and most == 2
    assert len(tried) == len(set(tried)) == len(all_found(STUDY))


def test_an_interrupt_ends_all_lanes(tmp_path, monkeypatch) -> None:
    tried = []

    def process(command, **options):
        tried.append(command)
        raise subprocess.CalledProcessError(-signal.SIGINT, command)

    monkeypatch.setattr(subprocess, "run", process)
    assert not run.run_all(STUDY, tmp_path, tmp_path / "states", hours=1.0, at_once=2)
    assert 1 <= len(tried) <= 2


def test_the_page_says_what_each_machine_ran_and_how_it_held_the_workers(tmp_path) -> None:
    found = {name: dict(one) for name, one in all_found(STUDY).items()}
    on_gpu = [name for name in found if name.startswith("diloco-every-8")]
    for name in on_gpu:
        found[name]["machine"] = {"cores": 16, "platform": "gpu"}
    report.write("digits-replicas", STUDY, found, tmp_path / "page.md")
    cpu, gpu = [line for line in (tmp_path / "page.md").read_text().splitlines() if "hours of steps" in line]
    assert f"{len(found) - len(on_gpu)} runs" in cpu and "a simulated CPU device for each worker" in cpu
    assert f"{len(on_gpu)} runs (diloco-every-8-workers-2)" in gpu and "under `vmap`" in gpu and "platform gpu" in gpu
    # A machine with a CPU can hold them so, too.
    for name in on_gpu:
        found[name] |= {"machine": found["dense-bf16-workers-2-rate-0.05-seed-0"]["machine"], "one_device": True}
    plain, shared = report.machines(found)
    assert "under `vmap`" not in plain and "under `vmap`" in shared


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path) -> None:
    """The result after a kill is that of a run which was left alone."""
    pytest.importorskip("sklearn")
    cell = Cell("digits", Row("topk-sgd", density=0.02), 2, 3, 0.05, tuning=True)
    start = (
        "import json, os, pathlib, sys; from benchmarks.training import cells, run;"
        "from benchmarks.tasks.tasks import TASKS; import dataclasses;"
        "t = TASKS['digits']; TASKS['digits'] = dataclasses.replace(t, settings=dataclasses.replace(t.settings, epochs=6));"
        "cell = cells.Cell('digits', cells.Row('topk-sgd', density=0.02), 2, 3, 0.05, tuning=True);"
        "kill = len(sys.argv) > 3\n"
        "class Killed(run.Epochs):\n"
        "    def finished_epoch(self, method, seed, epoch, past):\n"
        "        if kill and epoch == 2: os._exit(9)\n"
        "run.Epochs = Killed\n"
        "run.run_cell(cell, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    root = pathlib.Path(__file__).parents[1]

    def go(out: str, *more: str) -> int:
        (tmp_path / out).mkdir(exist_ok=True)
        command = [sys.executable, "-c", start, str(tmp_path / out), str(tmp_path / f"{out}-state"), *more]
        return subprocess.run(command, cwd=root, check=False).returncode

    assert go("killed", "kill") == 9
    assert not list((tmp_path / "killed").iterdir())
    assert go("killed") == 0 and go("whole") == 0
    one, other = (json.loads((tmp_path / out / f"{cell.name}.json").read_text()) for out in ("killed", "whole"))
    for name in ("evaluation", "loss_of_ten_steps", "wire", "settings"):
        np.testing.assert_equal(one[name], other[name])
    assert len(one["evaluation"]) == 3
