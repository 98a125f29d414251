"""A run that is stopped at any moment ends within seconds, in one sentence, and keeps what it has saved."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("typer")

from gradcomp_jax import _process
from tests.cli.standard_streams import COMMAND, environment, hearing

TRIES = int(os.environ.get("GRADCOMP_STOPS", "5"))
"""Of each command; GRADCOMP_STOPS=25 makes fifty in all."""
SEED = int(os.environ.get("GRADCOMP_SEED", random.SystemRandom().randrange(10**6)))
WITHIN_S = 5.0
PHASES = (("", 3.0), ("compiling", 1.0), (" steps", 0.5), ("epoch 1,", 2.0), ("epoch 3,", 0.2))
"""What stderr says when the wait begins, and its longest: imports, compilations, the first steps, steps and saves."""
TRAIN = ("train", "--method", "dgc", "--workers", "2", "--batch", "718", "--epochs", "10000", "--checkpoint", "saved")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads from /proc which signals a process catches")
COMPARE = ("compare", "--methods", "dense,terngrad", *TRAIN[3:])


@contextlib.contextmanager
def started(folder: pathlib.Path, *words: str, code: str | None = None, **variables: str) -> Iterator[subprocess.Popen]:
    """A command with files for its streams, from when it catches signals; killed in the end."""
    command = [sys.executable, "-c", code] if code else COMMAND
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        running = subprocess.Popen(
            hearing([*command, *words]),
            cwd=folder,
            env=environment(**variables),
            stdout=out,
            stderr=err,
            # Whatever it leaves behind must not reach the tests' own processes.
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 60
        while not _catches(running.pid, signal.SIGTERM):
            assert running.poll() is None and time.monotonic() < until, (folder / "err").read_text()
            time.sleep(0.01)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _catches(process: int, number: int) -> bool:
    try:
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _check(folder: pathlib.Path, running: subprocess.Popen, number: int) -> str:
    """Sends a signal and returns what the process has said since; the states that were saved are whole."""
    running.send_signal(number)
    sent = time.monotonic()
    code = running.wait(60)
    took = time.monotonic() - sent
    said = (folder / "err").read_text()
    assert code == 128 + number, (code, said)
    assert took < WITHIN_S, (took, said)
    assert (folder / "out").read_text() == ""
    last = said.splitlines()[-1]
    assert last.startswith("stopped ") or last == "gradcomp: stopped", said
    assert said.count("stopped") == 1
    assert "Traceback" not in said and "Fatal" not in said and "Error" not in said, said
    for record in folder.rglob("run.json"):
        epoch = json.loads(record.read_text())["epoch"]
        assert epoch == 0 or (record.parent / f"epoch-{epoch}").is_dir()
    return last


LOADED = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("process", {_process.__file__!r})
process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)
"""
"""Without JAX, whose import takes seconds."""

BUSY = """
process.take_over()
with process.leaving(lambda: "stopped at step 3", grace_s=0.5):
    while True:
        try:
            sum(range(10**6))
        except BaseException:
            pass
"""
LEAVES = """
def command():
    try:
        with process.leaving(lambda: "stopped by the watch"):
            while True:
                time.sleep(0.01)
                process.raise_if_stopped()
    except process.Stopped as stop:
        print("stopped by itself", file=sys.stderr)
        raise SystemExit(0)
process.run(command)
"""
AT_ONCE = """
process.take_over()
time.sleep(60)
"""
CHILD = """
process.take_over()
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(1)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
open("ready", "w").close()
time.sleep(60)
"""


@on_linux
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (BUSY, "stopped at step 3"),
        (LEAVES, "stopped by itself"),
        (AT_ONCE, "gradcomp: stopped"),
        (CHILD, "gradcomp: stopped"),
    ],
    ids=["what swallows every exception", "what leaves by itself", "what has nothing to save", "a child is let alone"],
)
def test_whatever_the_main_thread_does(tmp_path: pathlib.Path, code: str, said: str) -> None:
    with started(tmp_path, code=LOADED + code) as running:
        time.sleep(0.2)
        until = time.monotonic() + 30
        while code is CHILD and not (tmp_path / "ready").exists():
            assert running.poll() is None and time.monotonic() < until, (tmp_path / "err").read_text()
            time.sleep(0.01)
        assert _check(tmp_path, running, signal.SIGINT) == said


@on_linux
def test_a_pipe_that_nobody_reads_holds_nothing_up() -> None:
    full = "os.set_blocking(2, False)\ntry:\n    while True: os.write(2, b'x' * 4096)\nexcept BlockingIOError: pass\n"
    code = f"{LOADED}process.take_over()\n{full}os.set_blocking(2, True)\nprint('full', flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.stdout.readline() == b"full\n"
            running.send_signal(signal.SIGTERM)
            assert running.wait(WITHIN_S) == 143
        finally:
            running.kill()


@on_linux
def test_what_a_shell_has_ignored_stays_ignored(tmp_path: pathlib.Path) -> None:
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{LOADED}{AT_ONCE}"
    with started(tmp_path, code=code) as running:
        running.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert running.poll() is None
        assert _check(tmp_path, running, signal.SIGTERM) == "gradcomp: stopped"


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("words", [TRAIN, COMPARE], ids=["train", "compare"])
def test_a_signal_at_any_moment_ends_it_in_one_sentence(tmp_path: pathlib.Path, words: tuple[str, ...]) -> None:
    chance = random.Random(f"{SEED} {words[0]}")
    print(f"GRADCOMP_SEED={SEED}")
    for attempt in range(TRIES):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        number = chance.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM])
        marker, longest = PHASES[attempt % len(PHASES)]
        # Compilations are what a handler of Python has to wait for.
        cache = "false" if marker == "compiling" else "true"
        with started(folder, *words, JAX_ENABLE_COMPILATION_CACHE=cache) as running:
            until = time.monotonic() + 240
            while marker not in (folder / "err").read_text():
                assert running.poll() is None and time.monotonic() < until, (folder / "err").read_text()
                time.sleep(0.01)
            wait = longest * chance.random()
            time.sleep(wait)
            last = _check(folder, running, number)
        print(f"{words[0]} {attempt}: {number.name} {wait:.2f} s after {marker!r}: {last}")
