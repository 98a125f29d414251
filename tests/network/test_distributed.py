"""Training in several processes is the training that one process does, and saves what any number can go on from."""

import dataclasses
import functools
import json
import os
import pathlib
import shlex
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.experiments import Trainer, load, task, train_with_checkpoints
from tests.conformance.environments import means_kept
from tests.network.processes import PATIENCE_S, environment, free_port, record, started, training, wait

pytest.importorskip("typer")
pytestmark = pytest.mark.xdist_group("processes")


@functools.cache
def trainer(method: str, *, workers: int, batch: int, epochs: int) -> Trainer:
    whole = task("digits")
    settings = dataclasses.replace(whole.settings, workers=workers, batch_per_worker=batch // workers, epochs=epochs)
    return Trainer(method, whole.on(load("digits")), settings)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dgc"])
def test_two_processes_are_one_process_with_two_devices(method: str, tmp_path: pathlib.Path) -> None:
    words = ("--method", method, "--batch", "128", "--epochs", "2", "--seed", "3")
    words = (*words, "--checkpoint", str(tmp_path / "saved"))
    with training(tmp_path, 2, *words) as running:
        assert wait(running, within_s=PATIENCE_S) == [0, 0], running[0].stderr + running[1].stderr
    three = trainer(method, workers=2, batch=128, epochs=3)
    two = trainer(method, workers=2, batch=128, epochs=2)
    expected, found = two.run(3), record(tmp_path / "saved")
    # A sum of two does not depend on their order: bit for bit.
    assert found["loss"] == list(expected.loss)
    assert found["evaluation"] == list(expected.evaluation)
    # The first process says what came out, the other nothing.
    assert "bytes/step" in running[0].stdout and "devices of 2 processes" in running[0].stdout
    assert running[1].stdout == ""
    assert not (tmp_path / "out-1").exists()
    fields = json.loads((tmp_path / "out-0" / f"train-{method}-digits.json").read_text())
    assert fields["machine"]["processes"] == 2
    assert fields["settings"]["workers"] == 2
    assert fields["methods"][0]["wire"]["sent"] == two.wire.sent
    # One process goes on with what two have saved, as if it had always been one.
    resumed = train_with_checkpoints(three, 3, tmp_path / "saved")
    assert resumed.loss == three.run(3).loss


def exchange_of(state) -> gc.transforms.ExchangeState:
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, gc.transforms.ExchangeState))
    return next(node for node in found if isinstance(node, gc.transforms.ExchangeState))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2])
def test_two_processes_restore_what_four_workers_kept(workers: int, tmp_path: pathlib.Path) -> None:
    before = trainer("topk-sgd", workers=4, batch=128, epochs=1)
    train_with_checkpoints(before, 0, tmp_path / "saved")
    four = gc.restore_checkpoint(tmp_path / "saved" / "epoch-1", before.initial_state(0))
    script = str(pathlib.Path(__file__).with_name("restore.py"))
    address = f"127.0.0.1:{free_port()}"
    words = (str(workers), str(tmp_path / "saved" / "epoch-1"), str(tmp_path / "again"))
    commands = [[sys.executable, script, address, str(index), "2", *words] for index in range(2)]
    env = environment(workers // 2, PYTHONPATH=os.pathsep.join(sys.path))
    with started(tmp_path, commands, [env] * 2) as running:
        assert wait(running, within_s=PATIENCE_S) == [0, 0], running[0].stderr + running[1].stderr
    after = trainer("topk-sgd", workers=workers, batch=128, epochs=1)
    # As one process would have resized it, bit for bit; and the mean is what it was.
    alone = gc.restore_checkpoint(tmp_path / "saved" / "epoch-1", after.initial_state(0))
    together = gc.restore_checkpoint(tmp_path / "again", after.initial_state(0))
    chex.assert_trees_all_equal(alone, together)
    old, new = means_kept(exchange_of(four), 4), means_kept(exchange_of(together), workers)
    assert len(old) == len(new) > 0
    assert all(np.any(mean) for mean in old)
    for a, b in zip(old, new, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=0 if workers == 8 else 2.0**-24 * np.abs(a).max())


NAMED = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "{index}"}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "{index}",
    "SLURM_LOCALID": "{index}",
    "SLURM_STEP_NUM_NODES": "1",
    "JAX_COORDINATOR_PORT": "{port}",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "{index}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{index}",
    "JAX_COORDINATOR_PORT": "{port}",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(NAMED, id="environment"),
        pytest.param(SLURM, id="SLURM", marks=pytest.mark.slow),
        pytest.param(OPEN_MPI, id="Open MPI", marks=pytest.mark.slow),
    ],
)
def test_processes_find_each_other_without_options(variables: dict[str, str], tmp_path: pathlib.Path) -> None:
    port = free_port()
    line = "gradcomp train --distributed --method dense --batch 718 --epochs 1 --out ."
    command = [sys.executable, "-m", "gradcomp_jax.cli", *shlex.split(line)[1:]]
    told = [{name: text.format(port=port, index=index) for name, text in variables.items()} for index in range(2)]
    environments = [environment(**names, PYTHONPATH=os.pathsep.join(sys.path)) for names in told]

    def popen(index: int):
        return lambda argv, **options: subprocess.Popen(argv, cwd=tmp_path, **options)

    with started(tmp_path, [command] * 2, environments, popen) as running:
        assert wait(running, within_s=PATIENCE_S) == [0, 0], running[0].stderr + running[1].stderr
    fields = json.loads((tmp_path / "train-dense-digits.json").read_text())
    assert fields["machine"]["processes"] == fields["settings"]["workers"] == 2


@pytest.mark.slow
def test_a_folder_that_only_one_process_sees_is_refused(tmp_path: pathlib.Path) -> None:
    """Each machine its own disk: found out before anything is trained."""
    address = f"127.0.0.1:{free_port()}"
    words = ("train", "--distributed", "--coordinator", address, "--processes", "2", "--method", "dense")
    commands = [
        [
            *(sys.executable, "-m", "gradcomp_jax.cli", *words),
            "--process-id",
            str(i),
            "--checkpoint",
            str(tmp_path / f"disk{i}"),
        ]
        for i in range(2)
    ]
    with started(tmp_path, commands, [environment()] * 2) as running:
        assert wait(running, within_s=PATIENCE_S) == [2, 2]
    for process in running:
        (sentence,) = process.sentences()
        assert f"process {process.index}: cannot save in" in sentence
    assert "process 1 does not see what process 0 writes there" in running[0].sentences()[0]


@pytest.mark.slow
def test_without_a_cluster_the_options_are_named(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "gradcomp_jax.cli", "train", "--distributed", "--processes", "2"]
    with started(tmp_path, [command], [environment()]) as running:
        assert wait(running, within_s=PATIENCE_S) == [2]
    (sentence,) = running[0].sentences()
    assert "finds no cluster" in sentence
    assert "--coordinator HOST:PORT (or JAX_COORDINATOR_ADDRESS), --process-id (or JAX_PROCESS_ID)" in sentence
    assert "--processes (or" not in sentence
