"""Runs are packed into one file a task, and nothing of them is lost."""

import json
from pathlib import Path

import pytest

from benchmarks import packed

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]


def test_packed_runs_are_the_same_and_later_ones_count_before_them(tmp_path: Path) -> None:
    runs = {f"run-{i}": {"loss": [i / 3, None], "task": "ä"} for i in range(3)}
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run, indent=1))
    assert packed.read(tmp_path) == runs
    assert packed.pack(tmp_path) == 3 and packed.read(tmp_path) == runs
    assert [path.name for path in tmp_path.iterdir()] == [packed.NAME]
    later = {"run-1": {"loss": [0.5]}, "run-9": {}}
    for name, run in later.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    assert packed.read(tmp_path) == runs | later
    assert packed.pack(tmp_path) == 4 and packed.read(tmp_path) == runs | later
    assert packed.pack(tmp_path) == 4 and len((tmp_path / packed.NAME).read_text().splitlines()) == 4


def test_a_folder_without_runs_stays_empty(tmp_path: Path) -> None:
    assert packed.pack(tmp_path) == 0 and not list(tmp_path.iterdir())
