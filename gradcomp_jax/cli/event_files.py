"""TensorBoard event files of a run: loss, metric, diagnostics of the state, bytes a step."""

import contextlib
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gradcomp_jax._errors import SettingError
from gradcomp_jax.experiments import Listener, Past, Wire
from gradcomp_jax.training import diagnostics

_FLUSHED_S = 30.0
"""Seconds after which what is written can be read, within an epoch."""


class EventFiles(Listener, contextlib.AbstractContextManager[Any]):
    """Writes a new event file for each run, in ``FOLDER/METHOD-seed-SEED``.

    Steps count from 1. ``train/loss`` is of every step. Of an epoch's last step are the metric (``eval/accuracy``,
    ``eval/loss`` or ``train/epoch_loss``), what :func:`gradcomp_jax.diagnostics` returns, and ``wire/bytes_per_step``. A run
    that continues hides what an earlier file has from there on. Of several processes the first one writes, and all compute.
    Where a file cannot be written any more, a line on stderr says so, and the run continues without.
    """

    _TAGS: Mapping[str, str] = {
        "accuracy": "eval/accuracy",
        "evaluation loss": "eval/loss",
        "training loss": "train/epoch_loss",
        "bits per character": "eval/bits_per_character",
        "perplexity": "eval/perplexity",
    }

    def __init__(self, folder: pathlib.Path) -> None:
        """Takes the folder, which is made if it is not there."""
        if importlib.util.find_spec("tensorboardX") is None:
            raise SettingError("--log-dir needs tensorboardX: pip install -e '.[tensorboard]' in a checkout")
        self._folder = folder
        self._writes = jax.process_index() == 0
        if self._writes:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingError(f"cannot write to {folder}: {error}") from error
        self._writer: Any = None
        self._flushed = 0.0
        self._diagnostics: Callable[[Any], Any] = jax.jit(diagnostics)
        self._wires: dict[str, Wire] = {}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Closes the file, with all that was said."""
        self._close()

    def compiled(self, method: str, wire: Wire) -> None:
        """Keeps the bytes of a method's steps."""
        self._wires[method] = wire

    def started(self, method: str, seed: int, steps: int, done: int) -> None:
        """Opens a file, unless there is nothing to train."""
        self._close()
        if not self._writes or done == steps:
            return
        # The library's SummaryWriter has a thread, which a full disk ends: then it waits for its queue for ever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # The library names files by the second: of two in one second the later would overwrite the earlier.
        unique = f".{os.getpid()}.{time.time_ns()}"
        folder = self._folder / f"{method}-seed-{seed}"
        with self._told():
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), filename_suffix=unique)
            self._flushed = time.monotonic()
            if done:
                start = SessionLog(status=SessionLog.START)
                self._writer.write_event(Event(wall_time=time.time(), step=done + 1, session_log=start))

    def stepped(self, method: str, seed: int, step: int, loss: float) -> None:
        """Writes the loss."""
        self._write(step, {"train/loss": loss})

    def finished_epoch(self, method: str, seed: int, epoch: int, past: Past) -> None:
        """Writes what an epoch has come to."""
        # Each process takes part in what the workers sum.
        found = {name: float(np.asarray(value)) for name, value in self._diagnostics(past.state).items()}
        step = len(past.loss)
        found[self._TAGS[past.metric]] = past.evaluation[-1]
        found["wire/bytes_per_step"] = self._wires[method].sent_in(step)
        self._write(step, found, flush=True)

    def _write(self, step: int, values: Mapping[str, float], *, flush: bool = False) -> None:
        if self._writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        with self._told():
            for name, value in values.items():
                self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            if flush or time.monotonic() - self._flushed > _FLUSHED_S:
                self._writer.flush()
                self._flushed = time.monotonic()

    def _close(self) -> None:
        if self._writer is not None:
            with self._told():
                self._writer.close()
        self._writer = None

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer, self._writes = None, False
            sentence = f"cannot write event files in {self._folder}: {error.strerror}; the run goes on without"
            print(f"gradcomp: {sentence}", file=sys.stderr, flush=True)
