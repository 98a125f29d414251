"""gradcomp island: takes part, goes on, is followed and drawn; every mistake is one sentence with its remedy."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("typer")
pytest.importorskip("obstore")

from gradcomp_jax._files import lock_file
from gradcomp_jax.islands import history
from gradcomp_jax.islands.account import Record
from tests.cli.standard_streams import COMMAND, environment, hearing
from tests.cli.test_signals import on_linux

TASK = """
import jax.numpy as jnp
import numpy as np

def make(seed=0):
    x = np.random.default_rng(seed).normal(size=(64, 16)).astype(np.float32)
    truth = np.random.default_rng(9).normal(size=(16, 8)).astype(np.float32)

    def loss(params, x):
        return jnp.mean((x @ params["w"] - x @ truth) ** 2)

    return loss, {"w": jnp.zeros((16, 8))}, [x[i : i + 16] for i in range(0, 64, 16)], [x]
"""
OWN = ("--from", "own:make", "--grace", "0.1", "--every", "5")
JOIN = ("run", *OWN, "--name", "london")


@pytest.fixture
def island(gradcomp, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(TASK)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return lambda *words: gradcomp("island", *words)


def lines_of(text):
    """The rounds that were printed: number and what became of the payload."""
    return [(int(n), what) for n, what in re.findall(r"^ +(\d+)  (accepted|late|none)", text, re.MULTILINE)]


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_takes_part_goes_on_is_followed_and_drawn(island, tmp_path) -> None:
    first = island(*JOIN, "--rounds", "3")
    assert first.exit_code == 0, first.stderr
    assert first.stderr == "london joins run after round 0\n"
    header, *_, own, centre = first.stdout.splitlines()
    assert header.split() == ["round", "payload", "loss", "written", "read", "hidden"]
    printed = lines_of(first.stdout)
    assert printed[-1][0] == 3 and ("accepted" in {what for _, what in printed})
    assert re.fullmatch(r"london: \d accepted, \d late; its parameters: evaluation loss [\d.e-]+", own)
    done = history(tmp_path / "run")
    assert re.fullmatch(rf"centre after round {len(done)}: evaluation loss [\d.e-]+", centre)
    assert len(done) >= 3 and all([e.island for e in d.entries] == ["london"] for d in done)
    folder = tmp_path / "gradcomp-islands" / "london"
    noted = metrics_of(folder)
    assert [line["round"] for line in noted] == [number for number, _ in printed]
    assert all(line["loss"] > 0 for line in noted) and noted[-1]["accepted"] >= 2 and noted[-1]["bytes_written"] > 0
    # The run has had its rounds: nothing is sent again.
    again = island(*JOIN, "--rounds", "3")
    assert again.exit_code == 0 and lines_of(again.stdout) == [] and history(tmp_path / "run") == done
    assert f"london joins run after round {len(done)}" in again.stderr and "accepted, 0 late" in again.stdout
    more = island(*JOIN, "--rounds", str(len(done) + 2))
    assert more.exit_code == 0 and lines_of(more.stdout)[-1][0] == len(done) + 2
    assert [line["round"] for line in metrics_of(folder)][: len(noted)] == [line["round"] for line in noted]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    followed = island("run", *OWN, "--follow", "--rounds", "1")
    number = len(history(tmp_path / "run"))
    assert followed.exit_code == 0 and followed.stderr == ""
    assert re.fullmatch(rf"round {number}: evaluation loss [\d.e-]+\n", followed.stdout)
    drawn = island("run", "--picture", "run.png", "--metrics", str(folder), "--metrics", str(folder / "metrics.jsonl"))
    assert drawn.exit_code == 0 and drawn.stdout == "wrote run.png\n"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run",), "say one of --name NAME, to take part, --follow, and --picture FILE"),
        (("run", "--name", "a", "--follow"), "say one of --name NAME"),
        (("run", "--name", "a", "--metrics", "b"), "--metrics needs --picture"),
        (("run", "--name", "a", "--bits", "3"), "--bits must be 8, 4 or 2, got 3"),
        (("run", "--name", "a/b", *OWN), "an island's name has at most 63 letters"),
        (
            ("run", "--name", "a", "--folder", "own.py", *OWN),
            "cannot write in own.py: File exists: name another with --folder",
        ),
        (("own.py", "--name", "a", *OWN), "cannot open own.py as a store"),
        (("run", "--picture", "run.png"), "there is no folder run"),
        ((".", "--picture", "run.png"), "there is no run yet"),
        ((), "Missing argument 'PLACE'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence_and_makes_nothing(island, tmp_path, words, message) -> None:
    result = island(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "run.png").exists() and not (tmp_path / "run" / "configuration").exists()


def test_other_settings_are_named_with_their_options(island, tmp_path) -> None:
    assert island(*JOIN, "--rounds", "1").exit_code == 0
    for words, option, said in (
        (("--bits", "8"), "--task, --from or --bits", "code "),
        (
            ("--quorum", "2", "--outer-rate", "0.5"),
            "--outer-rate, --quorum",
            "learning_rate 0.7, not 0.5; quorum 1, not 2",
        ),
    ):
        result = island("run", *OWN, "--name", "tokyo", *words)
        assert result.exit_code == 2
        assert said in result.stderr and result.stderr.rstrip().endswith(f"or begin another run ({option})")
    taken = island(*JOIN, "--folder", "elsewhere")
    assert taken.exit_code == 2
    said = "an island london is in this run already: choose another name, or give it the folder of its records"
    assert taken.stderr.splitlines()[-1] == f"gradcomp: {said} (--name, --folder)"
    folder = tmp_path / "gradcomp-islands" / "london"
    with _locked(folder):
        result = island(*JOIN)
    assert result.exit_code == 2
    assert f"another process is the island of {folder}: wait for its end" in result.stderr
    (folder / "island.record").write_bytes(b"no record")
    damaged = island(*JOIN)
    assert damaged.exit_code == 2 and "damaged: name another --folder and another --name" in damaged.stderr


@contextlib.contextmanager
def _locked(folder):
    number = lock_file(folder / "island.lock", wait=False)
    try:
        yield
    finally:
        os.close(number)


def test_without_the_extra_the_remedy_is_named(island, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    result = island("run", "--picture", "run.png")
    assert result.exit_code == 2
    assert re.fullmatch(r"gradcomp: islands .*: pip install 'gradcomp_jax\[islands\]'\n", result.stderr)


def test_a_task_without_a_metric_shows_none(island, tmp_path) -> None:
    (tmp_path / "bare.py").write_text(TASK.replace(", [x]\n", "\n"))
    words = ("run", "--from", "bare:make", "--grace", "0.1", "--name", "london", "--rounds", "1")
    result = island(*words)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^london: \d accepted, \d late\ncentre after round \d$", result.stdout.rstrip(), re.MULTILINE)


@contextlib.contextmanager
def started(folder, *words):
    (folder / "own.py").write_text(TASK)
    with (folder / "err").open("w") as err:
        running = subprocess.Popen(
            hearing([*COMMAND, "island", *words]),
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def wait_for(folder, running, sentence):
    end = time.monotonic() + 120
    while sentence not in (said := (folder / "err").read_text()):
        assert running.poll() is None and time.monotonic() < end, said
        time.sleep(0.05)


@on_linux
@pytest.mark.slow
def test_a_signal_ends_it_in_order_and_it_goes_on(tmp_path: pathlib.Path) -> None:
    with started(tmp_path, *JOIN, "--every", "1000000", "--rounds", "1000") as running:
        wait_for(tmp_path, running, "joins run after round 0")
        # It trains, and sends nothing.
        time.sleep(3.0)
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
    said = "stopped after round 0: the same command goes on with what is in gradcomp-islands/london"
    assert (tmp_path / "err").read_text().splitlines()[-1] == said
    record = tmp_path / "gradcomp-islands" / "london" / "island.record"
    # What it had trained is there, though nothing was sent.
    assert record.exists() and abs(Record.from_bytes(record.read_bytes()).progress).max() > 0.1
    assert history(tmp_path / "run") == ()
    again = [*COMMAND, "island", *JOIN, "--rounds", "1"]
    after = subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert after.returncode == 0 and lines_of(after.stdout), after.stderr
    assert len(history(tmp_path / "run")) >= 1


@on_linux
@pytest.mark.slow
def test_a_follower_waits_for_a_run_and_is_stopped(tmp_path: pathlib.Path) -> None:
    with started(tmp_path, "run", *OWN, "--follow") as running:
        wait_for(tmp_path, running, "waits: there is no folder run")
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 143
    assert (tmp_path / "err").read_text().splitlines() == ["waits: there is no folder run", "stopped after round 0"]
    assert not (tmp_path / "run").exists()
