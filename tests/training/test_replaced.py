"""A checkpoint that is replaced: whenever the process ends, a whole one is there, and nothing of anybody else's is touched."""

import os
import pathlib
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

import gradcomp_jax as gc
from tests.killed import Killed, kill_before

LIKE = {"x": np.zeros(1000, np.int64), "y": np.zeros((3, 4), np.int64)}


def numbered(number: int) -> dict[str, np.ndarray]:
    return {name: np.full(value.shape, number) for name, value in LIKE.items()}


def number_in(path: pathlib.Path) -> int:
    """The number that all of a checkpoint holds."""
    restored = gc.restore_checkpoint(path, LIKE)
    (number,) = {int(n) for value in restored.values() for n in np.unique(value)}
    return number


def test_every_moment_of_a_replacement_leaves_a_whole_one(tmp_path, monkeypatch) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(path, numbered(0))
    saved, moment = 0, 0
    while True:
        moment += 1
        with monkeypatch.context() as patch:
            # Whatever the replacement does to the folders, from the digests of the new one on.
            changes = (
                (os, "rename"),
                (os, "replace"),
                (shutil, "rmtree"),
                (pathlib.Path, "unlink"),
                (pathlib.Path, "rmdir"),
            )
            kill_before(patch, moment, changes)
            try:
                gc.save_checkpoint(path, numbered(saved + 1), overwrite=True)
            except Killed:
                assert number_in(path) in (saved, saved + 1)
                saved = number_in(path)
            else:
                break
    assert moment > 8
    gc.save_checkpoint(path, numbered(99), overwrite=True)
    assert number_in(path) == 99
    assert os.listdir(tmp_path) == ["saved"]


def between_the_renames(path: pathlib.Path) -> None:
    """As a process leaves it that is killed when the old one is gone from its place, and the new one not there yet."""
    gc.save_checkpoint(path, numbered(1))
    gc.save_checkpoint(path.with_name("new"), numbered(2))
    path.rename(path.with_name("saved.gradcomp-old"))
    path.with_name("new").rename(path.with_name("saved.gradcomp-new"))


def test_between_the_renames_a_checkpoint_is_there(tmp_path) -> None:
    path = tmp_path / "saved"
    between_the_renames(path)
    assert number_in(path) == 2
    with pytest.raises(ValueError, match=r"saved exists already: pass overwrite=True"):
        gc.save_checkpoint(path, numbered(3))
    assert number_in(path) == 2
    assert os.listdir(tmp_path) == ["saved"]


def thesis(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "chapter-1.tex").write_text("mine")


def link_to_thesis(path: pathlib.Path) -> None:
    thesis(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def link_to_checkpoint(path: pathlib.Path) -> None:
    gc.save_checkpoint(path.with_name("elsewhere"), numbered(1))
    path.symlink_to(path.with_name("elsewhere"))


def steps(path: pathlib.Path) -> None:
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(numbered(7)))


def everything_in(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("suffix", ["", ".gradcomp-new", ".gradcomp-old"])
@pytest.mark.parametrize(
    "make", [thesis, link_to_thesis, link_to_checkpoint, steps, lambda path: path.write_text("a file")]
)
def test_what_is_not_a_checkpoint_is_left_as_it_is(make, suffix: str, tmp_path) -> None:
    path = tmp_path / "saved"
    if suffix:
        gc.save_checkpoint(path, numbered(1))
    make(path.with_name(f"saved{suffix}"))
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match=rf"saved{suffix}.* is not a checkpoint, and is left as it is"):
        gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("beside", [False, True])
def test_what_somebody_has_put_into_a_checkpoint_is_not_deleted_with_it(beside: bool, tmp_path) -> None:
    path = tmp_path / "saved"
    gc.save_checkpoint(path, numbered(1))
    for inside in (path, *([tmp_path / "saved.gradcomp-old"] if beside else [])):
        if inside != path:
            gc.save_checkpoint(inside, numbered(0))
        (inside / "plots").mkdir()
        (inside / "plots" / "loss.png").write_text("mine")
        (inside / "notes.txt").write_text("mine")
    before = everything_in(tmp_path)
    sentence = (
        "is not a checkpoint, and is left as it is" if beside else r"holds notes.txt, plots beside the checkpoint.*move"
    )
    with pytest.raises(ValueError, match=sentence):
        gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert everything_in(tmp_path) == before


def test_an_empty_folder_and_a_damaged_checkpoint_are_replaced(tmp_path) -> None:
    path = tmp_path / "saved"
    path.mkdir()
    gc.save_checkpoint(path, numbered(1), overwrite=True)
    (path / "_METADATA").unlink()
    gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert number_in(path) == 2


def test_steps_and_items_of_a_manager(tmp_path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(numbered(1)))
    with ocp.CheckpointManager(tmp_path) as manager:
        two = ocp.args.Composite(one=ocp.args.StandardSave(numbered(2)), two=ocp.args.StandardSave(numbered(3)))
        manager.save(2, args=two)
    assert number_in(tmp_path / "1") == 1
    assert number_in(tmp_path / "2" / "two") == 3
    with pytest.raises(ValueError, match=r"2 is not one checkpoint, but holds one, two: pass the path of the one"):
        gc.restore_checkpoint(tmp_path / "2", LIKE)
    with pytest.raises(ValueError, match=r"is not one checkpoint, but holds 1/default, 2/one, 2/two: pass the path"):
        gc.restore_checkpoint(tmp_path, LIKE)


def test_a_save_in_the_background_fails_at_the_next_save(tmp_path) -> None:
    """What docs/checkpoints.md says of Orbax's manager: the loop sees the error, and goes on from the step before."""
    resource = pytest.importorskip("resource")
    manager = ocp.CheckpointManager(tmp_path)
    manager.save(0, args=ocp.args.StandardSave(numbered(0)))
    manager.wait_until_finished()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"x": np.random.default_rng(0).integers(0, 1 << 40, 1 << 16)}
    try:
        # A disk that takes no more.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        manager.save(1, args=ocp.args.StandardSave(large))
        with pytest.raises(ValueError, match="Error writing"):
            manager.save(2, args=ocp.args.StandardSave(large))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert manager.latest_step() == 0
    manager.save(2, args=ocp.args.StandardSave(numbered(2)))
    manager.close()
    assert number_in(tmp_path / "0") == 0
    assert number_in(tmp_path / "2") == 2
