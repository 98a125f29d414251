"""Listeners of a command: a progress bar over all its runs, and one that tells the watchdog of every event."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradcomp_jax.distributed import Watchdog
from gradcomp_jax.experiments import Listener, Past, RunResult


class Bar(Listener):
    """Shows how many of the steps are done, and how the present run does."""

    def __init__(self, console: Console, runs: int) -> None:
        """Makes a bar for ``runs`` runs of equal length, shown between enter and exit."""
        self._runs = runs
        self._accuracy = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        """Starts to draw the bar."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops drawing; the bar stays on the screen unless an error takes its place."""
        if kind is not None:
            self._progress.live.transient = True
        self._progress.stop()

    def compiling(self, method: str) -> None:
        """Names the method that is being compiled."""
        self._progress.update(self._task, description=f"compiling {method}")

    def started(self, method: str, seed: int, steps: int) -> None:
        """Sets the length of the whole bar from the length of one run."""
        self._accuracy = ""
        self._progress.update(self._task, total=steps * self._runs)
        self._describe(method, seed)

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Moves on by one step."""
        self._progress.advance(self._task)

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Shows the test accuracy of the present run."""
        self._accuracy = f", {past.accuracy[-1]:.1%}"
        self._describe(method, seed)

    def finished(self, result: RunResult) -> None:
        """Leaves a line for each run where a bar cannot be redrawn, in a log file for example."""
        console = self._progress.console
        if not console.is_terminal:
            console.print(f"seed {result.seed}, {result.method}: {result.final_accuracy:.1%}", highlight=False)

    def _describe(self, method: str, seed: int) -> None:
        self._progress.update(self._task, description=f"seed {seed}, {method}{self._accuracy}")


class Beating(Listener):
    """Passes every event on to another listener, and calls ``watchdog.beat()``."""

    def __init__(self, listener: Listener, watchdog: Watchdog) -> None:
        """Wraps a listener, which is told all that this one is told."""

        def passing_on(tell: Callable[..., None]) -> Callable[..., None]:
            def heard(*event: object) -> None:
                watchdog.beat()
                tell(*event)

            return heard

        for name in vars(Listener):
            if not name.startswith("_"):
                setattr(self, name, passing_on(getattr(listener, name)))
