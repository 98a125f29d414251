"""A log is written line by line, without control characters, and says where a run stopped and where it goes on."""

import contextlib
import io
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import pytest

pytest.importorskip("typer")

from rich.console import Console

from gradcomp_jax import _process
from gradcomp_jax.cli import progress as module
from gradcomp_jax.cli.progress import Bar, Each, Lines, progress
from gradcomp_jax.experiments import Listener, Past, RunResult, StepTime, Wire, task
from tests.cli.standard_streams import COMMAND, environment, hearing


class Stream(io.StringIO):
    """Remembers what was written whenever it was flushed."""

    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__()
        self._terminal = terminal
        self.flushed: list[str] = []

    def isatty(self) -> bool:
        return self._terminal

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


RESULT = RunResult(
    "dgc", "digits", 3, task("digits").settings, (2.0, 1.0), (0.5,), Wire(9, 9.0, 9), StepTime(1.0, 1.0, 1.0, 2)
)


def test_every_event_is_a_line_at_once(monkeypatch) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    shown = progress(1, "start it again")
    assert type(shown) is Lines
    with shown:
        shown.compiling("dgc")
        shown.started("dgc", 3, 2, 0)
        shown.stepped("dgc", 3, 1, 2.0)
        shown.stepped("dgc", 3, 2, 1.0)
        shown.finished_epoch("dgc", 3, 1, Past(None, (2.0, 1.0), (0.5,)))
        shown.finished(RESULT)
    lines = [
        "compiling dgc",
        "seed 3, dgc: 2 steps",
        "seed 3, dgc: epoch 1, step 2/2, loss 1, accuracy 50.0%",
        "seed 3, dgc: done, accuracy 50.0%",
    ]
    assert stream.getvalue().splitlines() == lines
    for line in lines:
        assert any(text.endswith(line + "\n") for text in stream.flushed)


def test_a_long_epoch_says_now_and_then_how_far_it_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    shown = Lines("")
    shown.started("dgc", 0, 5, 2)
    time.sleep(0.01)
    shown.stepped("dgc", 0, 3, 0.25)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "seed 0, dgc: goes on after step 2 of 5"
    assert second == "seed 0, dgc: step 3/5, loss 0.25"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), _process.Stopped(signal.SIGTERM)])
def test_a_stop_is_a_line(capsys, error) -> None:
    with pytest.raises(type(error)), Lines("the same command goes on") as shown:
        shown.started("dgc", 0, 5, 0)
        shown.stepped("dgc", 0, 1, 0.25)
        raise error
    assert capsys.readouterr().err.splitlines()[-1] == "stopped seed 0, dgc at step 1 of 5: the same command goes on"


def test_an_error_of_the_user_has_its_own_sentence(capsys) -> None:
    with pytest.raises(ValueError, match="no such thing"), Lines("") as shown:
        shown.compiling("dgc")
        raise ValueError("no such thing")
    assert capsys.readouterr().err == "compiling dgc\n"


def test_a_terminal_has_a_bar_and_lines_above_it_for_a_stop_and_a_resume(monkeypatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    assert isinstance(progress(1, ""), Bar)
    bar = Bar(Console(file=stream, force_terminal=True, width=150), 1, "the same command goes on")
    with pytest.raises(KeyboardInterrupt), bar:
        bar.compiling("dgc")
        bar.started("dgc", 0, 10, 4)
        bar.stepped("dgc", 0, 5, 0.1)
        bar.finished_epoch("dgc", 0, 1, Past(None, (0.1,), (0.75,)))
        raise KeyboardInterrupt
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "seed 0, dgc: goes on after step 4 of 10" in text
    assert "seed 0, dgc, 75.0%" in text and "5/10 steps" in text
    # A time, then what it is.
    assert re.search(r"steps \d:\d\d:\d\d elapsed, [-\d:]+ left", text)
    assert "stopped seed 0, dgc at step 5 of 10: the same command goes on" in text


def test_every_event_reaches_the_watchdog() -> None:
    class Counter:
        beats = 0

        def beat(self) -> None:
            self.beats += 1

    counter = Counter()
    beating = Each(counter.beat, at_end=True)
    events = [name for name in vars(Listener) if not name.startswith("_")]
    for name in events:
        getattr(beating, name)()
    assert counter.beats == len(events) >= 6


def test_a_run_is_left_between_two_events_and_no_handler_is_set_here(monkeypatch) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(_process, "_watch", types.SimpleNamespace(number=0, describe=str, grace_s=0.0))
    listener = Each(_process.raise_if_stopped)
    with pytest.raises(_process.Stopped) as caught, _process.leaving(lambda: "stopped"):
        listener.stepped("dgc", 0, 1, 0.5)
        _process._watch.number = signal.SIGTERM
        # What is complete is kept.
        listener.finished(RESULT)
        listener.finished_epoch("dgc", 0, 1, Past(None))
        pytest.fail("it goes on")
    assert caught.value.code == 143
    # Who leaves says so: nobody else is to say it again.
    assert _process._watch.describe() == ""
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def wait_for(text: str, log: pathlib.Path, running: subprocess.Popen, *, within_s: float) -> None:
    until = time.monotonic() + within_s
    while text not in log.read_text():
        assert running.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.05)


@contextlib.contextmanager
def trained(folder: pathlib.Path) -> Iterator[subprocess.Popen]:
    """A process that trains for more epochs than there is time for, with a file for its log; killed in the end."""
    words = (
        "train",
        "--method",
        "dense",
        "--workers",
        "2",
        "--batch",
        "718",
        "--checkpoint",
        "saved",
        "--epochs",
        "10000",
    )
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            hearing([*COMMAND, *words]), cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_redirected_run_that_is_stopped_goes_on(tmp_path, number, code) -> None:
    """What the log says is there while the run goes on."""
    log = tmp_path / "log"
    with trained(tmp_path) as running:
        wait_for("epoch 2,", log, running, within_s=240)
        running.send_signal(number)
        assert running.wait(60) == code
    text = log.read_text()
    assert "\x1b" not in text and "\r" not in text and "Traceback" not in text
    assert re.search(
        r"^stopped seed 0, dense at step \d+ of 20000: the same command goes on .* in saved$", text, re.MULTILINE
    )
    with trained(tmp_path) as running:
        wait_for("seed 0, dense: goes on after step", log, running, within_s=240)
