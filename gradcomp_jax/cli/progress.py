"""How a run tells a person what it does: a bar on a terminal, lines in a log, the end of it, and a word to the watchdog."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from gradcomp_jax.experiments import Listener, Past, RunResult, show

_EVERY_S = 10.0
"""Seconds from one line of a log to the next, within an epoch."""


class Lines(Listener, contextlib.AbstractContextManager[Any]):
    """Writes a line to stderr for each compilation, start, epoch and end, and now and then in between."""

    def __init__(self, advice: str) -> None:
        """Makes a listener; ``advice`` says at the end of the line on a stop how to continue."""
        self._advice = advice
        self._run = ""
        self._step = self._steps = 0
        self._told = time.monotonic()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Says where a run was stopped, if a signal has stopped it."""
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.say(self.stopped())

    def stopped(self) -> str:
        """Returns the sentence on where a run was stopped, and how to continue."""
        where = f"{self._run} at step {self._step} of {self._steps}" if self._run else "before the first run"
        return f"stopped {where}: {self._advice}"

    def say(self, text: str) -> None:
        """Writes a line, at once."""
        print(text, file=sys.stderr, flush=True)
        self._told = time.monotonic()

    def compiling(self, method: str) -> None:
        """Names the method that is being compiled."""
        self.say(f"compiling {method}")

    def started(self, method: str, seed: int, steps: int, done: int) -> None:
        """Says how long the run is, and whether it continues from something saved."""
        self._run, self._step, self._steps = f"seed {seed}, {method}", done, steps
        if done == steps:
            self.say(f"{self._run}: complete already, its {steps} steps are read and not trained again")
        elif done:
            self.say(f"{self._run}: goes on after step {done} of {steps}")
        else:
            self.say(f"{self._run}: {steps} steps")

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Says how far the run is, if nothing was said for a while."""
        self._step = step
        if time.monotonic() - self._told > _EVERY_S:
            self.say(f"{self._run}: step {step}/{self._steps}, loss {loss:.4g}")

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Says what the run has come to."""
        judged = f"{past.metric} {show(past.metric, past.evaluation[-1])}"
        self.say(f"{self._run}: epoch {epoch}, step {self._step}/{self._steps}, loss {past.loss[-1]:.4g}, {judged}")

    def finished(self, result: RunResult) -> None:
        """Says what came out."""
        self.say(f"{self._run}: done, {result.metric} {show(result.metric, result.final_evaluation)}")


class Bar(Lines):
    """Shows on a terminal how many of the steps of all runs are done, and how the present run does."""

    def __init__(self, console: Console, runs: int, advice: str) -> None:
        """Makes a bar for ``runs`` runs of equal length, shown between enter and exit."""
        super().__init__(advice)
        self._runs = runs
        done = ("{task.description}", BarColumn(), MofNCompleteColumn(), "steps")
        times = (TimeElapsedColumn(), "elapsed,", TimeRemainingColumn(), "left")
        self._progress = Progress(*done, *times, console=console)
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        """Starts to draw the bar."""
        self._progress.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Stops drawing; the bar stays on the screen unless an error takes its place."""
        if kind is not None:
            self._progress.live.transient = True
        self._progress.stop()
        super().__exit__(kind, error, trace)

    def compiling(self, method: str) -> None:
        """Names the method that is being compiled."""
        self._progress.update(self._task, description=f"compiling {method}")

    def started(self, method: str, seed: int, steps: int, done: int) -> None:
        """Sets the length of the whole bar from the length of one run; above it, a line on what is not trained again."""
        if done:
            super().started(method, seed, steps, done)
        self._run, self._step, self._steps = f"seed {seed}, {method}", done, steps
        self._progress.update(self._task, total=steps * self._runs, advance=done, description=self._run)

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Moves on by one step."""
        self._step = step
        self._progress.advance(self._task)

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Shows the metric of the present run."""
        judged = show(past.metric, past.evaluation[-1])
        self._progress.update(self._task, description=f"{self._run}, {judged}")

    def finished(self, result: RunResult) -> None:
        """Leaves the bar as it is."""


def progress(runs: int, advice: str) -> Lines:
    """Returns a bar where stderr is a terminal, and lines without control characters where it is a file or a pipe."""
    return Bar(Console(stderr=True), runs, advice) if sys.stderr.isatty() else Lines(advice)


class Each(Listener):
    """Calls a function at every event: to leave a run after a signal, or to tell a watchdog of it."""

    def __init__(self, function: Callable[[], None], *, at_end: bool = False) -> None:
        """Takes the function; ``at_end`` calls it when a run is over too, which is too late to leave it."""
        self._function, self._at_end = function, at_end

    def _call(self, *event: Any, **more: Any) -> None:
        self._function()

    compiling = compiled = started = stepped = finished_epoch = _call

    def finished(self, *event: Any, **more: Any) -> None:
        """Calls the function if that was asked for."""
        if self._at_end:
            self._function()
