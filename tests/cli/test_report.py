"""The table, the page and the picture, from a comparison that is written out here."""

import dataclasses
import errno
import json
import os

import pytest

pytest.importorskip("typer")

from rich.console import Console

from gradcomp_jax._errors import SettingError
from gradcomp_jax.cli import plot, report, runs, tables
from gradcomp_jax.cli.options import Training
from gradcomp_jax.experiments import RunResult, StepTime, Wire, summarize, task

SETTINGS = task("digits").settings
BASELINES = {"dense-bf16": 2_000_000, "dense": 4_000_000}


def run(method, seed, *, accuracy, sent, loss=(2.0, 1.0, 0.5, 0.25), metric="accuracy"):
    return RunResult(
        method=method,
        dataset="digits",
        seed=seed,
        settings=SETTINGS,
        loss=loss,
        evaluation=accuracy,
        wire=Wire(sent, 1.5 * sent, 2 * sent),
        step_time=StepTime(0.002, 0.001, 0.004, 4),
        metric=metric,
    )


@pytest.fixture
def result():
    runs = [
        run("dgc", 0, accuracy=(0.5, 0.90), sent=8_000),
        run("dense", 0, accuracy=(0.6, 0.97), sent=4_000_000),
        run("dgc", 1, accuracy=(0.5, 0.94), sent=8_000),
        run("dense", 1, accuracy=(0.6, 0.97), sent=4_000_000),
    ]
    return summarize(runs, BASELINES)


def test_rows(result):
    assert report.rows(result) == [
        # The standard deviation of .90 and .94 is .04 / sqrt(2).
        ("dgc", "92.00 ± 2.83", "8,000", "12,000", "250x", "500x", "2.00"),
        ("dense", "97.00 ± 0.00", "4,000,000", "6,000,000", "0.5x", "1.0x", "2.00"),
        ("dense-bf16", "not trained", "2,000,000", "2,000,000", "1.0x", "2.0x", "-"),
    ]


def test_one_seed_has_no_spread():
    (row, *_) = report.rows(summarize([run("dgc", 0, accuracy=(0.5,), sent=10)], BASELINES))
    assert row[1] == "50.00"


def test_losses_are_no_percentages():
    runs = [
        run("dgc", seed, accuracy=(2.0, value), sent=10, metric="training loss")
        for seed, value in enumerate((0.5, 0.7))
    ]
    found = summarize(runs, BASELINES)
    assert report.columns(found)[1] == "training loss"
    assert report.rows(found)[0][1] == "0.6 ± 0.14"
    assert report.notes(found)[0].startswith("training loss: mean over the steps of the last epoch")


def test_what_a_task_says_of_itself_is_below_its_table_and_others_say_nothing():
    found = summarize([run("dgc", 0, accuracy=(2.5, 2.0), sent=10, metric="bits per character")], BASELINES)
    assert not any("protocol" in note for note in report.notes(found))
    found = dataclasses.replace(found, dataset="language-model", settings=task("language-model").settings)
    assert "gap to dense: it falls with the length of training; docs/results/protocol.md" in report.notes(found)[-1]
    assert report.title(found).startswith("language-model: 8 workers x 1 example, ")
    assert "AdamW 0.006 falling to 0" in report.title(found)


def test_the_page_has_the_table_the_command_and_the_machine(result):
    page = report.markdown(result, command="gradcomp compare --seeds 2")
    assert "```\ngradcomp compare --seeds 2\n```" in page
    assert "| dgc | 92.00 ± 2.83 | 8,000 | 12,000 | 250x | 500x | 2.00 |" in page
    assert "over 2 seeds" in page
    assert f"cores {result.machine['cores']}" in page
    assert f"jax {result.versions['jax']}" in page


def test_a_run_that_diverged_is_still_json(result):
    lost = run("dgc", 2, accuracy=(0.1, 0.1), sent=8_000, loss=(2.0, float("inf"), float("nan"), 1.0))
    fields = json.loads(summarize([lost], BASELINES).to_json())
    assert fields["methods"][0]["runs"][0]["loss"] == [2.0, None, None, 1.0]
    gone = run("dgc", 0, accuracy=(float("nan"), float("inf")), sent=8_000, metric="evaluation loss")
    fields = json.loads(summarize([gone, gone], BASELINES).to_json())
    assert fields["methods"][0]["runs"][0]["evaluation"] == [None, None]
    assert fields["methods"][0]["evaluation_mean"] is fields["methods"][0]["evaluation_std"] is None


def test_the_table_stays_and_says_which_run_diverged():
    lost = run("dgc", 1, accuracy=(0.5, 0.1), sent=8_000, loss=(2.0, float("inf"), float("nan"), 1.0))
    runs = [run("dgc", 0, accuracy=(0.5, 0.9), sent=8_000), lost, run("dense", 0, accuracy=(0.6, 0.97), sent=9)]
    found = summarize(runs, BASELINES)
    assert report.notes(found)[0].startswith("diverged: dgc is not finite at step 2 of seed 1; ")
    assert not any("dense is not" in note for note in report.notes(found))
    gone = [run("dgc", s, accuracy=(1.0, float("nan")), sent=9, metric="evaluation loss") for s in (0, 1)]
    found = summarize(gone, BASELINES)
    assert report.rows(found)[0][:3] == ("dgc", "diverged", "9")
    assert "| dgc | diverged | 9 |" in report.markdown(found, command="")
    assert "in the evaluation of seed 0, in the evaluation of seed 1" in report.notes(found)[0]


@pytest.mark.parametrize(
    "runs",
    [
        [run("dgc", 0, accuracy=(0.5,), sent=8_000, loss=(1.0,))],
        [run("dgc", 0, accuracy=(0.1, 0.1), sent=0, loss=(2.0, float("nan")))],
        [run("dgc", 0, accuracy=(0.4, float("nan")), sent=9, loss=(2.0, float("inf")), metric="evaluation loss")],
        [run("dgc", 0, accuracy=(float("nan"),), sent=9, loss=(float("nan"),), metric="training loss")],
        [
            run("dgc", seed, accuracy=(value, -1.0), sent=9, loss=(0.0, value), metric="training loss")
            for seed, value in enumerate((1.7976931348623157e308, -1e300))
        ],
        [run(f"method-{i}", 0, accuracy=(0.5, 0.9), sent=10**i) for i in range(1, 13)],
    ],
    ids=[
        "one step",
        "diverged, nothing sent",
        "diverged",
        "never finite",
        "beyond all axes",
        "more methods than colours",
    ],
)
def test_every_comparison_can_be_drawn(runs):
    assert plot.picture_of(summarize(runs, BASELINES)).startswith(b"\x89PNG")


def test_the_picture_shows_the_means(result):
    figure = plot.draw(result)
    loss, accuracy, cost = figure.axes
    lines = {line.get_label().split(":")[0]: line for line in accuracy.lines}
    assert lines["dgc"].get_ydata().tolist() == pytest.approx([50.0, 92.0])
    assert lines["dense"].get_ydata().tolist() == pytest.approx([60.0, 97.0])
    assert len(loss.lines) == 2
    assert [line.get_xdata().tolist() for line in cost.lines if line.get_marker() == "o"] == [[8_000], [4_000_000]]


def test_a_table_is_printed_though_its_files_cannot_be_written(result, tmp_path, monkeypatch, capsys):
    def full(*file, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tables, "write_whole", full)
    with pytest.raises(SettingError, match=r"cannot write the results that are printed above: .*No space left"):
        runs.finish(Console(), result, Training(out=tmp_path), "compare", "gradcomp compare")
    assert "92.00 ± 2.83" in capsys.readouterr().out


def test_bytes_of_workers_that_share_a_device_are_no_compiled_programs(result):
    shared = summarize([one for method in result.methods for one in method.runs], BASELINES, one_device=True)
    assert "read from the compiled program at" in "".join(report.notes(result))
    assert "read from the program of a step on devices of their own, before" in "".join(report.notes(shared))
