"""The program of docs/clusters.md runs as it stands, in two processes that SLURM might have started."""

import os
import pathlib
import re
import sys

import pytest

from tests.network.processes import PATIENCE_S, environment, free_port, started, wait

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "clusters.md"
pytestmark = pytest.mark.xdist_group("processes")


@pytest.mark.slow
def test_the_program_trains(tmp_path: pathlib.Path) -> None:
    found = re.search(r"<!-- example: clusters -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    (tmp_path / "program.py").write_text(found.group(1), encoding="utf-8")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    slurm |= {"SLURM_LOCALID": "0", "JAX_COORDINATOR_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(sys.path)}
    environments = [environment(2, **slurm, SLURM_PROCID=str(index)) for index in range(2)]
    with started(tmp_path, [[sys.executable, str(tmp_path / "program.py")]] * 2, environments) as running:
        assert wait(running, within_s=PATIENCE_S) == [0, 0], running[0].stderr + running[1].stderr
    # Libraries may print too; the loss is the last line, and of process 0 alone.
    assert 0 < float(running[0].stdout.splitlines()[-1]) < 0.4
    assert not re.search(r"^0\.\d+$", running[1].stdout, re.MULTILINE)
