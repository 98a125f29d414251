"""The exchange beside a training: its thread and its folder, which one process of an island has."""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable

import numpy as np

from gradcomp_jax import _checks
from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import is_draft, lock_file, read_file, write_whole
from gradcomp_jax.islands.host_codec import Codec
from gradcomp_jax.islands.island import Island, Keep, Wait
from gradcomp_jax.islands.keys import alive_key
from gradcomp_jax.islands.outer import Vector
from gradcomp_jax.islands.store import Store, StoreError

_RECORD, _LOCK = "island.record", "island.lock"
_LARGEST_NAMES = 1 << 24
_TELLS_AFTER = 30.0


class Exchanging:
    """Runs an island's loop in a thread, and hands vectors over between it and the training.

    Attributes:
        island: the island, once it has started.
        base: where training departed last.
    """

    base: Vector

    def __init__(
        self, make: Callable[[bytes | None], Island], code: Codec, store: Store, folder: pathlib.Path, weight: float
    ) -> None:
        """Takes what makes an island of the record in its folder."""
        self._make, self._code, self._store, self._folder, self._weight = make, code, store, folder, weight
        self._begun = False
        self._dropped, self._busy = 0, 0.0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="island", daemon=True)
        self._lock: int | None = None
        self._away = "nobody has answered yet"

    def start(self) -> None:
        """Takes the folder, and starts the thread."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_file(self._folder / _LOCK, wait=False)
        except BlockingIOError as error:
            raise SettingError(f"another process is the island of {self._folder}: wait for its end") from error
        try:
            for entry in list(os.scandir(self._folder)):
                # A process was killed while it wrote.
                if is_draft(entry.name, _RECORD) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry)
            # Nobody else writes the record from here on. It holds two vectors, a payload and names.
            limit = 8 * self._code.size + self._code.payload_bytes + _LARGEST_NAMES
            self.island = self._make(read_file(self._folder / _RECORD, limit=limit))
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self._thread.start()

    def begin(self, timeout: float | None) -> Vector:
        """Waits for a centre; returns the parameters to begin with."""
        self._raise()
        start, told = time.monotonic(), False
        while (centre := self.island.land()) is None:
            self._raise()
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout:
                raise TimeoutError(f"there was no centre within {timeout} s: {self._away}")
            if waited > _TELLS_AFTER and not told:
                _checks.warn(f"an island has waited for the run's centre for {_TELLS_AFTER} s: {self._away}")
                told = True
            time.sleep(0.01)
        self.base, self._begun = centre, True
        progress = self.island.progress
        return centre - progress if progress.size else centre

    def has_news(self, steps: int, every: int) -> bool:
        """Returns whether a centre has come, or a payload may leave."""
        self._raise()
        return self.island.has_landing or self.island.may_depart(steps, every)

    def exchange(self, here: Vector, steps: int, every: int) -> tuple[tuple[bool, bool], Vector]:
        """Lands, and departs; returns whether the parameters change and whether a payload leaves, and the parameters."""
        x, finite = self._finite(here, self.base)
        changed = not finite
        if (centre := self.island.land()) is not None:
            x = centre + (x - self.base)
            self.base, changed = centre, True
        departs = self.island.may_depart(steps, every)
        if departs:
            self.island.depart(self.base - x, self._weight)
            self.base = x
            self._wake.set()
        return (changed, departs), x

    def end(self, here: Vector | None, timeout: float) -> bool:
        """Sends what the parameters have gained, if they are given; ends the thread, and leaves the folder."""
        if self._lock is None:
            return False
        island, all_sent = self.island, False
        left: Vector | None = None
        if here is not None:
            x, _ = self._finite(here, self.base)
            end = time.monotonic() + timeout
            while self._thread.is_alive() and time.monotonic() < end:
                if (centre := island.land()) is not None:
                    x, self.base = centre + (x - self.base), centre
                if island.may_depart(1, 1):
                    late = island.status.late
                    island.depart(self.base - x, self._weight)
                    self.base = x
                    island.leave()
                    self._wake.set()
                    self._thread.join(max(0.0, end - time.monotonic()))
                    all_sent = not self._thread.is_alive() and island.error is None and island.status.late == late
                    break
                time.sleep(0.01)
            left = self.base - x
        self._stop.set()
        self._wake.set()
        self._thread.join()
        if island.ready and self._begun:
            island.put_aside(left)
            self._keep(island.record())
        if island.ready and island.status.away == 0:
            # The others need not wait for it.
            with contextlib.suppress(StoreError):
                self._store.delete(alive_key(island.name))
        os.close(self._lock)
        self._lock = None
        return all_sent

    def numbers(self) -> dict[str, float]:
        """Returns what the island did, for :meth:`Member.diagnostics`."""
        status = self.island.status
        found = {name: float(getattr(status, name)) for name in vars(status)}
        return found | {"dropped": float(self._dropped), "hidden_seconds": self._busy}

    def _finite(self, x: Vector, base: Vector) -> tuple[Vector, bool]:
        if np.isfinite(x).all():
            return x, True
        self._dropped += 1
        _checks.warn(
            "parameters are not finite: this island goes on from where it departed, without its steps since then"
        )
        return base, False

    def _keep(self, record: bytes) -> None:
        """Writes the record, so that it is there even after a loss of power, before anything that follows."""
        write_whole(self._folder / _RECORD, record, follow=False)
        number = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def _raise(self) -> None:
        if self.island.error is not None:
            raise self.island.error

    def _serve(self) -> None:
        """Does what the island asks for, until it has left or is stopped."""
        loop, answer = self.island.run(), None
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                request = loop.throw(answer) if isinstance(answer, StoreError) else loop.send(answer)
                answer = None
                if isinstance(request, Wait):
                    self._busy += time.monotonic() - started
                    self._wake.wait(request.seconds)
                    self._wake.clear()
                    continue
                try:
                    if isinstance(request, Keep):
                        self._keep(request.data)
                    else:
                        answer = self._store.perform(request)
                except OSError as error:
                    # What cannot be written or read now is asked for again.
                    answer = error if isinstance(error, StoreError) else StoreError(str(error))
                    self._away = str(answer)
                self._busy += time.monotonic() - started
        except StopIteration:
            pass
        except Exception as error:  # told to whoever calls the next step
            self.island.error = error
