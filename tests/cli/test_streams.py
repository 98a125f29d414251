"""Standard streams that are full, closed or at an end: no traceback, and a sensible exit code."""

import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from gradcomp_jax import _process
from tests.cli.standard_streams import COMMAND, environment

PLAN = ("plan", "--params", "5M")
METHODS = ("methods",)
TRAIN = ("train", "--method", "dense", "--workers", "2", "--batch", "718", "--epochs", "2")
COMPARE = ("compare", "--methods", "dense-bf16", "--seeds", "1", *TRAIN[3:])
WRONG = ("plan", "--params", "0")
FULL = "gradcomp: cannot write to stdout: No space left on device\n"

CLOSED = "gradcomp: cannot write to stdout: Bad file descriptor\n"

full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


def run(folder: pathlib.Path, words: tuple[str, ...], redirection: str) -> tuple[int, str, str]:
    """Runs a command in a shell; returns exit code, stdout and stderr, where they are not redirected."""
    line = f'exec "$@" {redirection}'
    result = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr, result.stderr
    return result.returncode, result.stdout, result.stderr


@pytest.mark.slow
@full
def test_a_full_disk_under_stdout_is_one_sentence(tmp_path) -> None:
    assert run(tmp_path, PLAN, ">/dev/full") == (1, "", FULL)


@full
@pytest.mark.slow
@pytest.mark.parametrize("words", [METHODS, ("--help",), ("--version",), ("train", "--help")], ids=" ".join)
def test_so_it_is_for_every_command(tmp_path, words) -> None:
    assert run(tmp_path, words, ">/dev/full") == (1, "", FULL)


@full
@pytest.mark.slow
@pytest.mark.parametrize("words", [TRAIN, COMPARE], ids=["train", "compare"])
def test_a_run_whose_output_is_lost_has_written_its_files(tmp_path, words) -> None:
    code, _, said = run(tmp_path, words, ">/dev/full")
    assert code == 1 and said.endswith(FULL)
    (figures,) = tmp_path.glob("gradcomp-results/*.json")
    assert json.loads(figures.read_text())["methods"]
    # What is said on the way is not what a run is for.
    code, out, _ = run(tmp_path, words, "2>/dev/full")
    assert code == 0 and "wrote gradcomp-results/" in out


@pytest.mark.slow
def test_a_stream_that_is_closed_is_nowhere_and_results_that_are_lost_are_no_success(tmp_path) -> None:
    assert run(tmp_path, PLAN, ">&-") == (1, "", CLOSED)
    code, out, _ = run(tmp_path, PLAN, "2>&- <&-")
    assert code == 0 and "method" in out
    # The results do not land in what is printed.
    assert run(tmp_path, TRAIN, ">&- 2>&- <&-") == (1, "", "")
    assert json.loads((tmp_path / "gradcomp-results/train-dense-digits.json").read_text())["methods"]


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", ">&- 2>&-"])
def test_a_mistake_keeps_its_exit_code(tmp_path, redirection) -> None:
    assert run(tmp_path, WRONG, redirection) == (2, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [((*TRAIN, "--epochs", "9"), 1), (("train", "--help"), 1)])
def test_a_pipe_that_ends_ends_no_run_and_needs_no_word(tmp_path, words, code) -> None:
    """What ``head -1`` does."""
    running = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # From the first byte on nobody reads any more.
    running.stdout.close()
    first = running.stderr.readline()
    running.stderr.close()
    assert running.wait(300) == code
    assert b"Traceback" not in first
    if "--help" not in words:
        (figures,) = tmp_path.glob("gradcomp-results/*.json")
        assert len(json.loads(figures.read_text())["methods"][0]["runs"][0]["evaluation"]) == 9


class Broken(io.StringIO):
    """Takes so many writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self._left = writes

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_stream_goes_on_and_remembers(tmp_path) -> None:
    with (tmp_path / "file").open("w") as file:
        stream = _process.Stream(Broken(1), file.fileno())
        assert stream.write("one") == 3 and stream.problem is None
        assert stream.write("two") == 3 and isinstance(stream.problem, BrokenPipeError)
        assert stream.write("three") == 5
        stream.flush()
        assert stream.getvalue() == "one" and not stream.isatty()
        # What writes past it is not at a loss either.
        os.write(file.fileno(), b"four")
    assert (tmp_path / "file").read_text() == ""


def test_what_goes_to_a_closed_stream_is_lost_and_nothing_is_lost_of_silence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_process, "_closed", {1})
    with (tmp_path / "file").open("w") as file:
        stream = _process.Stream(file, 1)
        stream.write("")
        stream.flush()
        assert stream.problem is None
        assert stream.write("the result") == 10
        assert stream.problem is not None and stream.problem.strerror == "Bad file descriptor"
        other = _process.Stream(file, 2)
        other.write("a word")
        assert other.problem is None


def test_a_stream_that_cannot_hold_a_sign_writes_its_number(monkeypatch) -> None:
    """The exit code, and what is printed, where nothing is wrong but the encoding."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(_process, "take_over", lambda: None)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as caught:
        _process.run(lambda: print("97.55 ± 0.93"))
    assert caught.value.code == 0 and sys.stdout is out
    assert out.buffer.getvalue() == b"97.55 \\xb1 0.93\n"
