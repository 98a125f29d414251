"""Processes that are not the same, and processes that must not meet: a sentence in each within seconds, code 2 or 1."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

import gradcomp_jax as gc
from tests.network.processes import Process, environment, free_port, record, started, wait, wait_for_epoch

pytest.importorskip("typer")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

WITHIN_S = 90
"""Two processes on a busy machine take some seconds to import JAX; before, these cases took 60 s to for ever."""

LINE = ("--method", "dense", "--batch", "718", "--epochs", "1")


@contextlib.contextmanager
def different(
    folder: pathlib.Path,
    *words: Sequence[str],
    environments: Sequence[dict[str, str]] | None = None,
    program: Sequence[str] = ("-m", "gradcomp_jax.cli"),
    places: Sequence[tuple[int, int]] | None = None,
    address: str | None = None,
) -> Iterator[list[Process]]:
    """A run whose processes have words, environments or places of their own."""
    address = address or f"127.0.0.1:{free_port()}"
    places = places or [(index, len(words)) for index in range(len(words))]
    commands = [
        [
            *(sys.executable, *program, "train", "--distributed", "--coordinator", address),
            *("--process-id", str(index), "--processes", str(count), "--out", str(folder / f"out-{place}"), *own),
        ]
        for place, ((index, count), own) in enumerate(zip(places, words, strict=True))
    ]
    own = [environment(**more) for more in environments or [{}] * len(words)]
    with started(folder, commands, own) as running:
        yield running


def sentence(running: Sequence[Process], code: int) -> str:
    """What all of them say, each once, when they end with this code; nothing else of C++ or Python is on stderr."""
    assert wait(running, within_s=WITHIN_S) == [code] * len(running), [process.stderr for process in running]
    said = set()
    for process in running:
        (line,) = process.sentences()
        said.add(line.removeprefix(f"gradcomp: process {process.index}: ").removeprefix("gradcomp: "))
        assert "Traceback" not in process.stderr and "*** " not in process.stderr, process.stderr
    assert len(said) == 1, said
    return said.pop()


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        (("--seed", "4"), {}, "--seed is 0 in process 0 and 4 in process 1"),
        ((), {"JAX_ENABLE_X64": "1"}, "jax_enable_x64 is False in process 0 and True in process 1"),
    ],
)
def test_what_the_processes_are_told_must_be_equal(words, more, expected: str, tmp_path: pathlib.Path) -> None:
    with different(tmp_path, LINE, (*LINE, *words), environments=[{}, more]) as running:
        assert expected in sentence(running, 2)


def test_another_source_is_named(tmp_path: pathlib.Path) -> None:
    package = pathlib.Path(gc.__file__).parent
    shutil.copytree(package, tmp_path / "other" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / package.name / "methods" / "dense.py").open("a") as file:
        file.write("# Another version.\n")
    main = ("-P", "-m", "gradcomp_jax.cli")
    paths = [os.pathsep.join([str(first), *sys.path]) for first in (package.parent, tmp_path / "other")]
    with different(
        tmp_path, LINE, LINE, environments=[{"PYTHONPATH": path} for path in paths], program=main
    ) as running:
        assert "the source of gradcomp_jax is" in sentence(running, 2)


TASK = """
import os
import jax.numpy as jnp
import numpy as np

def make():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(64, 8)).astype(np.float32)
    start = np.float32(os.environ.get("START", "0"))

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] - 1.0) ** float(os.environ.get("POWER", "2")))

    return loss, {"w": jnp.full((8, 1), start)}, [x[:32], x[32:]]
"""


@pytest.mark.parametrize(("more", "expected"), [({"POWER": "4"}, "the program of a step is")])
def test_programs_and_initial_parameters_must_be_equal(more, expected: str, tmp_path: pathlib.Path) -> None:
    """The same command line, and a task of one's own that is not the same everywhere."""
    (tmp_path / "apart.py").write_text(TASK)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = ("--from", "apart:make", "--method", "dense", "--epochs", "1")
    with different(tmp_path, words, words, environments=[path, path | more]) as running:
        assert expected in sentence(running, 2)


FAULTY = """
import sys
import jax
from gradcomp_jax.cli import main
from gradcomp_jax.experiments.run import Trainer

build = Trainer.__init__
steps = 0

def broken(self, *args, **kwargs):
    build(self, *args, **kwargs)
    right = self._step

    def step(state, batch):
        global steps
        steps += 1
        state, metrics = right(state, batch)
        if steps == 5 and jax.process_index() == 1:
            wrong = lambda a: jax.make_array_from_single_device_arrays(
                a.shape, a.sharding, [part.data.at[(0,) * a.ndim].add(1e-6) for part in a.addressable_shards])
            state = state._replace(params=jax.tree.map(wrong, state.params))
        return state, metrics

    self._step = step

Trainer.__init__ = broken
main(sys.argv[1:])
"""


def test_the_step_at_which_the_parameters_part_is_named(tmp_path: pathlib.Path) -> None:
    """A device that computes wrongly, once: every later step of the run looks healthy."""
    words = ("--method", "dense", "--batch", "120", "--epochs", "3", "--verify-every", "4")
    words = (*words, "--checkpoint", str(tmp_path / "saved"))
    with different(tmp_path, words, words, program=("-c", FAULTY)) as running:
        assert "the parameters differ from step 5 on: " in sentence(running, 2)
    # Nothing was saved with them.
    assert json.loads((tmp_path / "saved" / "run.json").read_text())["epoch"] == 0
    assert not list((tmp_path / "saved").glob("epoch-*"))


@pytest.mark.parametrize(
    ("places", "expected"), [([(0, 3), (1, 3), (1, 3)], "two processes say that they are process 1")]
)
def test_places_that_contradict_each_other(places, expected: str, tmp_path: pathlib.Path) -> None:
    with different(tmp_path, *[LINE] * len(places), places=places) as running:
        assert expected in sentence(running, 2)


def test_a_second_run_at_one_address_does_not_hurt_the_first(tmp_path: pathlib.Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    line = ("--method", "dense", "--batch", "718", "--epochs", "10000")
    saved = tmp_path / "first" / "saved"
    first_line = (*line, "--checkpoint", str(saved))
    with different(tmp_path / "first", first_line, first_line, address=address) as first:
        wait_for_epoch(saved, 1, first, within_s=2 * WITHIN_S)
        # At the address that was asked for, and at no other.
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2])), timeout=2)
        start = time.monotonic()
        with different(tmp_path / "second", line, line, address=address) as second:
            assert wait(second, within_s=WITHIN_S) == [1, 1]
            (told,), (stranger,) = (process.sentences() for process in second)
        assert "process 0 cannot listen at port" in told
        assert f"another program or a run that has started already answers at {address}" in stranger
        assert time.monotonic() - start < WITHIN_S
        wait_for_epoch(saved, record(saved)["epoch"] + 2, first, within_s=WITHIN_S)
