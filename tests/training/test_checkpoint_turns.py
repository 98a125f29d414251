"""Several writers and readers of one checkpoint: a whole one is there always, and nobody else's files are touched."""

import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest

import gradcomp_jax as gc
from gradcomp_jax.training import checkpoint_files
from tests.training.test_replaced import LIKE, everything_in, number_in, numbered

WRITER = """
import sys, numpy as np, gradcomp_jax as gc
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    gc.save_checkpoint(sys.argv[1], {"x": np.full(1000, number), "y": np.full((3, 4), number)}, overwrite=True)
"""


def written(path: pathlib.Path, first: int, end: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(end)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_two_writers_and_a_reader_always_find_a_whole_checkpoint(tmp_path) -> None:
    path, seen = tmp_path / "saved", set()
    gc.save_checkpoint(path, numbered(0))
    with written(path, 1, 30) as one, written(path, 101, 130) as other:
        while one.poll() is None or other.poll() is None:
            seen.add(number_in(path))
        assert one.returncode == other.returncode == 0, (one.stderr.read(), other.stderr.read())
    assert len(seen) > 5
    assert number_in(path) in (29, 129)
    assert os.listdir(tmp_path) == ["saved"]


def test_a_writer_waits_for_another_one(tmp_path) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(path, numbered(0))
    writer = threading.Thread(target=gc.save_checkpoint, args=(path, numbered(1)), kwargs={"overwrite": True})
    with checkpoint_files.taken(path):
        writer.start()
        writer.join(0.5)
        assert writer.is_alive()
        assert number_in(path) == 0
    writer.join()
    assert number_in(path) == 1
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_replaced_while_it_is_read_is_read_again(times: int, tmp_path, monkeypatch) -> None:
    path, restore, number = tmp_path / "saved", ocp.StandardCheckpointer.restore, 0
    gc.save_checkpoint(path, numbered(0))

    def replaced_before(*args, **kwargs):
        nonlocal number
        if number < times:
            number += 1
            gc.save_checkpoint(path, numbered(number), overwrite=True)
        return restore(*args, **kwargs)

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", replaced_before)
    assert number_in(path) == times


def test_what_is_replaced_whenever_it_is_read_is_said_to_be(tmp_path, monkeypatch) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(path, numbered(0))

    def replaced(*args, **kwargs):
        gc.save_checkpoint(path, numbered(1), overwrite=True)
        raise FileNotFoundError

    monkeypatch.setattr("gradcomp_jax.training.checkpoint._TRIES", 2)
    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", replaced)
    with pytest.raises(ValueError, match="was replaced while it was read: restore it again"):
        gc.restore_checkpoint(path, LIKE)


def test_a_folder_that_no_save_has_left_is_not_restored_as_the_checkpoint(tmp_path) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(tmp_path / "saved.gradcomp-new", numbered(666))
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        gc.restore_checkpoint(path, LIKE)
    before = everything_in(tmp_path)
    with pytest.raises(
        ValueError, match=r"is a checkpoint that no save to .*saved has left there, and is left as it is"
    ):
        gc.save_checkpoint(path, numbered(1))
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("suffix", ["new", "old"])
def test_a_checkpoint_of_somebody_elses_beside_ours_is_not_deleted(suffix: str, tmp_path) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(path, numbered(1))
    gc.save_checkpoint(tmp_path / f"saved.gradcomp-{suffix}", numbered(666))
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match=rf"saved.gradcomp-{suffix}.* no save to .* is left as it is"):
        gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert everything_in(tmp_path) == before
    assert number_in(path) == 1


def folder_of_an_array(place: pathlib.Path) -> None:
    place.mkdir(parents=True)
    (place / ".zarray").write_text("{}")
    (place / "0").write_text("mine")


def text(place: pathlib.Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("mine")


@pytest.mark.parametrize(
    "name, make",
    [
        ("_NOTES", text),
        ("_README", text),
        ("x.zarr", folder_of_an_array),
        ("x", folder_of_an_array),
        ("d/notes.txt", text),
        ("ocdbt.process_0/d/notes", text),
        ("ocdbt.process_mine/plots/loss.png", text),
        ("array_metadatas/mine.txt", text),
        ("manifest.ocdbt.backup", text),
        ("run.orbax-checkpoint-tmp", text),
        ("run.mark.mine", text),
        ("d/0123456789abcdef0123456789abcdef.bak", text),
    ],
)
def test_what_no_save_has_written_is_not_deleted_whatever_its_name(name: str, make, tmp_path) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(path, numbered(1))
    make(path / name)
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match="beside the checkpoint, which would be deleted with it: move that away"):
        gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert everything_in(tmp_path) == before


def test_a_link_in_a_checkpoint_is_not_followed(tmp_path) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(path, numbered(1))
    (path / "d").rename(tmp_path / "elsewhere")
    (path / "d").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="holds d beside the checkpoint"):
        gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert number_in(path) == 1


@pytest.mark.parametrize("zarr3", [False, True])
def test_arrays_in_folders_of_their_own_are_replaced(zarr3: bool, tmp_path) -> None:
    path, handler = tmp_path / "saved", ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, {**numbered(1), "a/b": {"c": np.zeros((4, 4))}, "n": np.int32(3)})
    text(path / "x" / "notes.txt")
    with pytest.raises(ValueError, match=r"holds x/notes.txt beside the checkpoint"):
        gc.save_checkpoint(path, numbered(2), overwrite=True)
    (path / "x" / "notes.txt").unlink()
    gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert number_in(path) == 2


@pytest.mark.parametrize("make", [text, lambda place: place.mkdir(), lambda place: os.mkfifo(place)])
def test_what_is_in_the_place_of_the_lock_is_left_as_it_is(make, tmp_path) -> None:
    make(tmp_path / "saved.gradcomp-lock")
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match=r"saved.gradcomp-lock is not of a save, and is left as it is"):
        gc.save_checkpoint(tmp_path / "saved", numbered(2))
    assert everything_in(tmp_path) == before
    assert os.listdir(tmp_path) == ["saved.gradcomp-lock"]
