"""A save that is cut off or fails: what was saved before is there, and the run goes on from it."""

import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import pytest

from gradcomp_jax.experiments import Listener, SettingError, resume, run_folder, train_with_checkpoints
from gradcomp_jax.experiments import record as records
from tests.experiments.descent import STEPS, After, everything_in, link_to_file, longer, notes, thesis
from tests.killed import Killed, kill_before


@pytest.mark.slow
def test_every_moment_of_a_save_leaves_a_run_that_goes_on(descent, whole, tmp_path, monkeypatch) -> None:
    """Killed before the first change to the folders, before the second, and so on."""
    moment = 0
    while True:
        moment += 1
        folder = tmp_path / str(moment)
        folder.mkdir()
        thesis(folder / "epoch-my_thesis")

        with monkeypatch.context() as patch:
            changes = (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")
            kill_before(patch, moment, changes)
            try:
                train_with_checkpoints(descent, 0, folder, share_folder=True)
            except Killed:
                pass
            else:
                break
        assert train_with_checkpoints(descent, 0, folder, share_folder=True).loss == whole.loss
        assert (folder / "epoch-my_thesis" / "chapter-1.tex").read_text() == "mine"
        names = {name for name in os.listdir(folder) if not name.endswith(".orbax-checkpoint-tmp")}
        assert names - {"epoch-1", "epoch-2"} == {"epoch-3", "epoch-4", "epoch-my_thesis", "run.json", "run.lock"}
        # A state that is too old may wait for the next epoch; nothing that no epoch would delete is left.
        assert all((folder / name / records.MARK).exists() for name in names & {"epoch-1", "epoch-2"})
    assert moment > 15


def full(limit: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("room", [10, 3_000])
def test_a_full_disk_costs_the_epoch_that_is_saved_and_no_more(descent, whole, run, room, caplog) -> None:
    """Too little for the record, and enough for it but not for a state."""
    resource = pytest.importorskip("resource")
    before, now = resource.getrlimit(resource.RLIMIT_FSIZE)[0], []
    try:
        with pytest.raises(
            SettingError, match=r"cannot save epoch 4 in .*; the last epoch saved is 3, and the same comm"
        ):
            train_with_checkpoints(descent, 0, run, listener=After(3, lambda: now.append(full(room))))
    finally:
        full(before)
    # And no traceback of a thread.
    assert now and not caplog.records
    listener = After()
    assert train_with_checkpoints(descent, 0, run, listener=listener).loss == whole.loss
    assert listener.steps == STEPS


def test_a_folder_that_cannot_be_written_to_is_one_sentence(descent, tmp_path, monkeypatch) -> None:
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system", "somewhere")

    monkeypatch.setattr(records, "write_whole", read_only)
    with pytest.raises(
        SettingError, match=r"cannot save in .*: Read-only file system \(somewhere\); name a folder that can"
    ):
        train_with_checkpoints(descent, 0, tmp_path)
    monkeypatch.undo()
    with pytest.raises(SettingError, match=r"cannot save in /proc/gradcomp: "):
        train_with_checkpoints(descent, 0, pathlib.Path("/proc/gradcomp"))


def test_a_state_that_cannot_be_deleted_is_deleted_later(descent, whole, tmp_path, monkeypatch) -> None:
    delete, failed = run_folder.delete, []

    def once(state: pathlib.Path, **more: str) -> None:
        if not failed:
            failed.append(state.name)
            raise OSError(16, "Device or resource busy")
        delete(state, **more)

    monkeypatch.setattr(run_folder, "delete", once)
    assert train_with_checkpoints(descent, 0, tmp_path).loss == whole.loss
    assert failed == ["epoch-1"]
    assert sorted(os.listdir(tmp_path)) == ["epoch-3", "epoch-4", "run.json", "run.lock"]


def test_a_state_that_can_never_be_deleted_keeps_no_other(descent, whole, tmp_path, monkeypatch) -> None:
    delete = run_folder.delete

    def refuse(state: pathlib.Path, **more: str) -> None:
        if state.name == "epoch-1":
            raise OSError(16, "Device or resource busy")
        delete(state, **more)

    monkeypatch.setattr(run_folder, "delete", refuse)
    assert train_with_checkpoints(descent, 0, tmp_path).loss == whole.loss
    assert sorted(os.listdir(tmp_path)) == ["epoch-1", "epoch-3", "epoch-4", "run.json", "run.lock"]
    assert records.read_record(tmp_path / "run.json", STEPS).deleting == (1,)


def test_a_state_that_cannot_be_written_is_one_sentence(descent, run, monkeypatch) -> None:
    def failing(*_, **__):
        raise ValueError("Error writing: No space left on device\nand much more")

    monkeypatch.setattr(resume, "save_checkpoint", failing)
    with pytest.raises(
        SettingError, match=r"cannot save epoch 3 .*: Error writing: No space left on device; the last "
    ):
        train_with_checkpoints(descent, 0, run)


CHILD = """
import pathlib, sys
from gradcomp_jax.experiments import Listener, train_with_checkpoints
from tests.experiments.descent import Descent, longer

class Says(Listener):
    def finished_epoch(self, method, seed, epoch, past):
        print(epoch, flush=True)

train_with_checkpoints(longer(10**6), 0, pathlib.Path(sys.argv[1]), share_folder=True, listener=Says())
"""


@pytest.mark.slow
def test_a_process_that_is_killed_at_random_moments_loses_nothing_that_was_saved(tmp_path) -> None:
    """Also the folder is free at once, and of others nothing is touched."""
    folder, rng, last, kills = tmp_path / "run", random.Random(0), 0, int(os.environ.get("GRADCOMP_KILLS", 6))
    folder.mkdir()
    for name, put in (("epoch-my_thesis", thesis), ("epoch-notes.txt", notes), ("processes.token", link_to_file)):
        put(folder / name)
    before = everything_in(tmp_path)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            said = int(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.3))
            with pytest.raises(SettingError, match="another run is going on"):
                train_with_checkpoints(longer(10**6), 0, folder)
            child.kill()
            said = max([said, *(int(line) for line in child.stdout if line.endswith("\n"))])
        found = records.read_record(folder / "run.json", STEPS).epoch
        assert last < said <= found <= said + 1
        result = train_with_checkpoints(longer(found + 1), 0, folder, share_folder=True)
        assert result.loss == longer(found + 1).run(0, listener=Listener()).loss
        last = found + 1
    after = everything_in(tmp_path)
    assert {path: after[path] for path in before} == before
    own = {f"epoch-{last - 1}", f"epoch-{last}", "run.json", "run.lock"}
    assert {name for name in os.listdir(folder) if str(folder / name) not in before} == own
