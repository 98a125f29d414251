"""The table, the page and the picture, from a comparison that is written out here."""

import json

import pytest

from gradcomp_jax.cli import plot, report
from gradcomp_jax.experiments import RunResult, StepTime, Wire, summarize, task

SETTINGS = task("digits").settings
BASELINES = {"dense-bf16": 2_000_000, "dense": 4_000_000}


def run(method, seed, *, accuracy, sent, loss=(2.0, 1.0, 0.5, 0.25)):
    return RunResult(
        method=method,
        dataset="digits",
        seed=seed,
        settings=SETTINGS,
        loss=loss,
        accuracy=accuracy,
        wire=Wire(sent, 1.5 * sent, 2 * sent),
        step_time=StepTime(0.002, 0.001, 0.004, 4),
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


@pytest.mark.parametrize(
    "runs",
    [
        [run("dgc", 0, accuracy=(0.5,), sent=8_000, loss=(1.0,))],
        [run("dgc", 0, accuracy=(0.1, 0.1), sent=0, loss=(2.0, float("nan")))],
        [run(f"method-{i}", 0, accuracy=(0.5, 0.9), sent=10**i) for i in range(1, 13)],
    ],
    ids=["one step", "diverged, nothing sent", "more methods than colours"],
)
def test_every_comparison_can_be_drawn(tmp_path, runs):
    path = tmp_path / "curves.png"
    plot.save_plot(summarize(runs, BASELINES), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_the_means(result):
    figure = plot.draw(result)
    loss, accuracy, cost = figure.axes
    lines = {line.get_label().split(":")[0]: line for line in accuracy.lines}
    assert lines["dgc"].get_ydata().tolist() == pytest.approx([50.0, 92.0])
    assert lines["dense"].get_ydata().tolist() == pytest.approx([60.0, 97.0])
    assert len(loss.lines) == 2
    assert [line.get_xdata().tolist() for line in cost.lines if line.get_marker() == "o"] == [[8_000], [4_000_000]]
