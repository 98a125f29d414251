"""Scaling: what must hold of modelled speed-ups, and measured ones by arithmetic."""

import json
import pathlib
import sys

import pytest

from benchmarks import scaling as command
from benchmarks.planning import scaling
from benchmarks.sweep.methods import METHODS
from benchmarks.training.curves import Curves

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

NETWORK = pathlib.Path(__file__).parents[1] / "docs" / "results" / "network.json"
CELLS = json.loads(NETWORK.read_text())["cells"]
SIZES = (2, 4, 64)


@pytest.fixture(scope="module")
def found() -> scaling.Scaling:
    return scaling.scaling(CELLS, "conv", rate=100e6, delay_s=0.0, sizes=SIZES)


def test_nothing_scales_better_than_its_workers(found) -> None:
    for name in METHODS:
        for lines in (found.weak, found.strong):
            assert all(0 < lines[name][n] <= n for n in SIZES)
        # Fewer workers than the batch is of compute longer for each exchange, as many for as long.
        assert found.strong[name][64] == pytest.approx(found.weak[name][64])
        assert all(found.strong[name][n] > found.weak[name][n] for n in (2, 4))
    assert found.weak["dgc"][64] > found.weak["dense-bf16"][64] > found.weak["dense"][64]


def test_what_was_measured_is_beside_it(found) -> None:
    cell = next(c for c in CELLS if c["key"] == "conv, 4 workers, 100 Mbit/s, 0 ms")
    assert found.measured["dgc"][4] == 4 * cell["nothing_s"] / cell["methods"]["dgc"]["step_s"]
    (line,) = [line for line in scaling.table(found.weak, found.measured) if line.startswith("| dgc |")]
    assert f"({found.measured['dgc'][4]:.3g})" in line and line.count("(") == 2


def test_a_link_that_was_not_measured_is_named() -> None:
    with pytest.raises(ValueError, match="no cell of conv over such a link; there are 1 Gbit/s and 0 ms; "):
        scaling.scaling(CELLS, "conv", rate=1.0, delay_s=0.0)


def test_metrics_by_workers_are_in_the_page(tmp_path, found) -> None:
    values = {0: (3.0, 2.0), 1: (3.0, 2.2)}
    runs = [Curves("enwik8", "dgc", {}, n, "bits per character", 120.0, values, {}, 1.0) for n in (64, 1)]
    alone = Curves("enwik8", "dion", {}, 8, "bits per character", 120.0, values, {}, 1.0)
    kept = command.by_workers([*runs, alone])
    assert list(kept) == ["dgc"] and list(kept["dgc"]) == [1, 64]
    lines = command.text(found, [*runs, alone], "python x.py", "", {"network.json": "an abacus, 2 cores"})
    assert "| dgc | 2.1 ± 0.14 | 2.1 ± 0.14 |" in lines
    assert any("Machines: network.json an abacus, 2 cores." in line for line in lines)
    command.draw(found, runs, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_committed_page_has_the_commands_tables(monkeypatch, capsys) -> None:
    """Without --write: who changes what a method sends writes the page again."""
    root = NETWORK.parents[2]
    page = (root / "docs" / "results" / "scaling.md").read_text(encoding="utf-8")
    words = page.split("```")[1].split()[2:]
    at = words.index("--write")
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words[:at], *words[at + 2 :]])
    command.main()
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(tables) >= 20 and [line for line in page.splitlines() if line.startswith("|")] == tables
