"""The benchmark of what the host does runs, and its tables are whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.benchmarks
def test_the_benchmark_runs() -> None:
    pytest.importorskip("zstandard")
    command = [sys.executable, str(ROOT / "benchmarks" / "islands.py"), "--entries", "2^18", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| ([\d.e-]+) \| [\d.]+% \| ([\d.]+) \| \d+ \| \d+ \|$", done.stdout, re.MULTILINE)
    assert [float(rate) for rate, _ in rows] == [1e-6, 1e-5, 1e-4]
    assert float(rows[0][1]) > 20
    assert len(re.findall(r"^\| `", done.stdout, re.MULTILINE)) == 2
