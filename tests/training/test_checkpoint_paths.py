"""Whatever a folder and the arrays of a state are called, what was saved is read back, or is refused before it is saved."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import gradcomp_jax as gc
from tests.training.test_replaced import number_in, numbered

SPECIAL = (
    "run[1]", "a[!b]", "run*", "r?n", "**", "[", "]", "nested[2]/x", "run[1]/run[1]", "a\\b", "{a,b}", "a#b", "100%41",
    "new\nline",
)  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_a_folder_of_any_name_is_saved_replaced_and_read_back(name: str, tmp_path) -> None:
    path = tmp_path / name
    gc.save_checkpoint(path, numbered(1))
    assert number_in(path) == 1
    with pytest.raises(ValueError, match="exists already: pass overwrite=True"):
        gc.save_checkpoint(path, numbered(2))
    gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert number_in(path) == 2
    assert os.listdir(path.parent) == [path.name]
    assert not list(pathlib.Path(tempfile.gettempdir()).glob("gradcomp-*/folder"))


def test_a_pattern_is_not_looked_for_among_other_folders(tmp_path) -> None:
    for number, name in enumerate(("run1", "run2", "run[12]", "run*", "run_12_")):
        gc.save_checkpoint(tmp_path / name, numbered(number))
    for number, name in enumerate(("run1", "run2", "run[12]", "run*", "run_12_")):
        assert number_in(tmp_path / name) == number


def test_a_name_of_that_kind_that_was_left_between_the_renames_is_found(tmp_path, monkeypatch) -> None:
    path, rename = tmp_path / "run[1]", os.rename
    gc.save_checkpoint(path, numbered(1))

    class Killed(BaseException):
        """As a signal."""

    def killed(source, target):
        if pathlib.Path(target) == path:
            raise Killed
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(Killed):
            gc.save_checkpoint(path, numbered(2), overwrite=True)
    assert not path.exists() and number_in(path) == 2
    gc.save_checkpoint(path, numbered(3), overwrite=True)
    assert number_in(path) == 3 and os.listdir(tmp_path) == ["run[1]"]


def test_without_a_place_for_a_link_the_remedy_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "t[1]").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t[1]"))
    with pytest.raises(ValueError, match="set TMPDIR to one without, or name another directory"):
        gc.save_checkpoint(tmp_path / "run[1]" / "saved", numbered(1))
    gc.save_checkpoint(tmp_path / "saved", numbered(1))


PROCESS = """
import sys, jax, numpy as np, gradcomp_jax as gc
from jax.sharding import NamedSharding, PartitionSpec as P
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
place = NamedSharding(jax.make_mesh((2,), ("data",)), P("data"))
def of(value):
    return jax.make_array_from_callback((4, 3), place, lambda index: np.full((4, 3), value, np.float32)[index])
for value in (1, 2):
    gc.save_checkpoint(sys.argv[3], {"x": of(value)}, overwrite=True)
print(float(gc.restore_checkpoint(sys.argv[3], {"x": of(0)})["x"].addressable_shards[0].data.sum()), flush=True)
"""


@pytest.mark.slow
def test_two_processes_save_into_a_folder_of_any_name(tmp_path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        run = [sys.executable, "-c", PROCESS, f"localhost:{probe.getsockname()[1]}"]
    path = tmp_path / "runs*" / "run[1]"
    both = [subprocess.Popen([*run, str(i), str(path)], stdout=subprocess.PIPE, text=True, env=env) for i in range(2)]
    for process in both:
        assert "12.0" in process.communicate(timeout=120)[0]
    assert os.listdir(path.parent) == [path.name]


A, B = np.full(3, 1.0), np.full(3, 2.0)
MEETING = {
    "a dot in a key": {"a.b": A, "a": {"b": B}},
    "a slash in a key": {"a/b": A, "a": {"b": B}},
    "a place in a list": {"x": [A, B], "x/0": A},
    "a place after a dot": {"x": (A, B), "x.1": A},
    "a slash at the end": {"a/": A, "a": B},
    "two slashes": {"a//b": A, "a": {"": {"b": B}}},
    "an empty key": {"": {"a": A}, ".a": B},
    "deep": {"m": {"l.w": A, "l": {"w": B}}},
    "of a step's state": gc.TrainState(np.int32(0), {"a.b": A, "a": {"b": B}}, ()),
}


@pytest.mark.parametrize("state", MEETING.values(), ids=MEETING)
def test_names_that_meet_are_refused_before_anything_is_saved(state, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^\S+ and \S+ of the state would be one array in a checkpoint.*: rename one"):
        gc.save_checkpoint(tmp_path / "saved", state)
    with pytest.raises(ValueError, match="would be one array in a checkpoint"):
        gc.checkpoint_metadata(state)
    assert not os.listdir(tmp_path)


APART = {
    "keys with dots and slashes": {"a.b": A, "c/d": B, "mlp/~/linear": {"w": A}},
    "numbers and their names": {"d": {0: A, 1: B}, "e": {"0": B}},
    "the beginning of another": {"a": A, "ab": B, "a_": A, "A": B},
    "dots alone": {".": A, "..": B, ".x": A},
    "nothing": {"": A, "b": B},
    "what Orbax calls its files": {"_METADATA": A, "d": B, "_sharding": A, "manifest.ocdbt": B, ".zarray": A},
    "letters of all kinds": {"é": A, "e\u0301": B, "中": A, " ": B, "a\nb": A, "a\0b": B, "a[0]": A, "*": B, "a\\b": A},
    "a long name": {"x" * 1000: A, "x" * 999: B},
    "one array": A,
}


@pytest.mark.parametrize("state", APART.values(), ids=APART)
def test_names_that_do_not_meet_are_read_back(state, tmp_path) -> None:
    gc.save_checkpoint(tmp_path / "saved", state)
    again = gc.restore_checkpoint(tmp_path / "saved", jax.tree.map(np.zeros_like, state))
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_name_that_is_not_unicode_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="has a name that is not Unicode: rename it"):
        gc.save_checkpoint(tmp_path / "saved", {"\ud800": A})


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("lost", ["_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"])
def test_what_cannot_be_read_back_takes_the_place_of_nothing(lost: str, overwrite: bool, tmp_path, monkeypatch) -> None:
    path, finish = tmp_path / "saved", ocp.StandardCheckpointer.wait_until_finished
    if overwrite:
        gc.save_checkpoint(path, numbered(1))

    def damaged(checkpointer) -> None:
        finish(checkpointer)
        for found in tmp_path.glob(f"saved*/{lost}"):
            if found.parent.name.endswith(".gradcomp-new") or not overwrite:
                found.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "wait_until_finished", damaged)
        with pytest.raises(ValueError, match=r"what was saved to .* cannot be read back \(.*\), and is deleted"):
            gc.save_checkpoint(path, numbered(2), overwrite=overwrite)
    assert os.listdir(tmp_path) == (["saved"] if overwrite else [])
    if overwrite:
        assert number_in(path) == 1
