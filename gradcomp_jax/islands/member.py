"""What a user has of an island: the steps of a training go through it, and the exchange is in a thread beside them."""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from gradcomp_jax import _checks
from gradcomp_jax._errors import SettingError
from gradcomp_jax._files import is_draft, lock_file, read_file, write_whole
from gradcomp_jax._typing import PyTree
from gradcomp_jax.islands.host_codec import Codec
from gradcomp_jax.islands.island import Island, Keep, Wait
from gradcomp_jax.islands.keys import alive_key
from gradcomp_jax.islands.outer import Vector
from gradcomp_jax.islands.store import Store, StoreError

_RECORD, _LOCK = "island.record", "island.lock"
_LARGEST_NAMES = 1 << 24
_TELLS_AFTER = 30.0


class Member:
    """Takes part in a run, for the training that calls :meth:`step`. Make one with :func:`join`, and use it with ``with``."""

    def __init__(
        self,
        make: Callable[[bytes | None], Island],
        code: Codec,
        store: Store,
        folder: pathlib.Path,
        every: int,
        weight: float,
    ) -> None:
        """Takes what makes an island of the record in its folder."""
        self._make, self._code, self._store, self._folder = make, code, store, folder
        self._every, self._weight = every, weight
        self._base: Vector | None = None
        self._steps = self._dropped = 0
        self._busy = self._blocked = 0.0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="island", daemon=True)
        self._lock: int | None = None
        self._away = "nobody has answered yet"

    def __enter__(self) -> "Member":
        """Starts the exchange, in a thread of its own."""
        if self._lock is not None or self._stop.is_set():
            raise RuntimeError("an island is joined once: call gradcomp_jax.islands.join again")
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
            self._island = self._make(read_file(self._folder / _RECORD, limit=limit))
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the exchange: what is under way and what was not sent stay in the folder of the island."""
        self.close()

    def begin(self, params: PyTree, *, timeout: float | None = None) -> PyTree:
        """Waits for the run's centre, and returns it in the place of the parameters.

        Args:
            params: the parameters, whose dtypes and shardings the result has.
            timeout: the most seconds to wait; for ever by default, because a store may be away.

        Raises:
            TimeoutError: if the store was away for so long.
            IslandError: if the run is another one.
        """
        self._raise()
        start, told = time.monotonic(), False
        while (centre := self._island.land()) is None:
            self._raise()
            waited = time.monotonic() - start
            if timeout is not None and waited > timeout:
                raise TimeoutError(f"there was no centre within {timeout} s: {self._away}")
            if waited > _TELLS_AFTER and not told:
                _checks.warn(f"an island has waited for the run's centre for {_TELLS_AFTER} s: {self._away}")
                told = True
            time.sleep(0.01)
        self._base = centre
        progress = self._island.progress
        return self._placed(centre - progress if progress.size else centre, params)

    def step(self, params: PyTree) -> PyTree:
        r"""Returns the parameters to go on with; call it after every step of the training.

        ``every`` calls after the last payload it takes the parameters' distance from where it departed, which the exchange
        encodes and writes while training goes on. Where a round was decided in the meantime, the parameters move with the
        centre: :math:`x \leftarrow c + (x - b)`, where b is where they were at the departure.

        Raises:
            IslandError: if the island cannot take part any more. A store that is away raises nothing.
        """
        self._raise()
        if self._base is None:
            raise RuntimeError("call begin(params) before the first step: an island starts from the run's centre")
        self._steps += 1
        if not self._island.has_landing and not self._island.may_depart(self._steps, self._every):
            return params
        started = time.monotonic()
        x, finite = self._vector(params, self._base)
        changed = not finite
        if (centre := self._island.land()) is not None:
            x = centre + (x - self._base)
            self._base, changed = centre, True
        if self._island.may_depart(self._steps, self._every):
            self._island.depart(self._base - x, self._weight)
            self._base, self._steps = x, 0
            self._wake.set()
        params = self._placed(x, params) if changed else params
        self._blocked += time.monotonic() - started
        return params

    def close(self, params: PyTree | None = None, *, timeout: float = 60.0) -> bool:
        """Ends the exchange. With the parameters, it sends what they have gained first and waits for its round.

        What is not accepted until then stays in the folder of the island, and goes out when it joins again.

        Args:
            params: the parameters; without them, steps since the last departure are not in the record.
            timeout: the most seconds to wait.

        Returns:
            Whether the last payload was accepted.
        """
        if self._lock is None:
            return False
        island, all_sent = self._island, False
        left: Vector | None = None
        if params is not None and self._base is not None:
            x, _ = self._vector(params, self._base)
            end = time.monotonic() + timeout
            while self._thread.is_alive() and time.monotonic() < end:
                if (centre := island.land()) is not None:
                    x, self._base = centre + (x - self._base), centre
                if island.may_depart(1, 1):
                    late = island.status.late
                    island.depart(self._base - x, self._weight)
                    self._base = x
                    island.leave()
                    self._wake.set()
                    self._thread.join(max(0.0, end - time.monotonic()))
                    all_sent = not self._thread.is_alive() and island.error is None and island.status.late == late
                    break
                time.sleep(0.01)
            left = self._base - x
        self._stop.set()
        self._wake.set()
        self._thread.join()
        if island.ready and self._base is not None:
            island.put_aside(left)
            self._keep(island.record())
        if island.ready and island.status.away == 0:
            # The others need not wait for it.
            with contextlib.suppress(StoreError):
                self._store.delete(alive_key(island.name))
        os.close(self._lock)
        self._lock = None
        return all_sent

    def diagnostics(self) -> Mapping[str, float]:
        """Returns what to log, as a flat dictionary of numbers for any metric writer.

        - ``island/round``: the last round that was decided;
        - ``island/accepted``, ``island/late``: rounds that accepted this island's payload, and those that did not;
        - ``island/bytes_written``, ``island/bytes_read``: of payloads and snapshots;
        - ``island/kept_norm``: norm of what was not sent, weighted;
        - ``island/away``: errors of the store in a row, 0 while it answers;
        - ``island/dropped``: times that parameters were not finite, and training went on from where it departed;
        - ``island/hidden_seconds``, ``island/blocked_seconds``: seconds that the exchange took beside training, and in it.
        """
        status = self._island.status
        found = {name: float(getattr(status, name)) for name in vars(status)}
        found |= {"dropped": float(self._dropped), "hidden_seconds": self._busy, "blocked_seconds": self._blocked}
        return {f"island/{name}": value for name, value in found.items()}

    def _vector(self, params: PyTree, base: Vector) -> tuple[Vector, bool]:
        x = self._code.flat(params)
        if np.isfinite(x).all():
            return x, True
        self._dropped += 1
        _checks.warn(
            "parameters are not finite: this island goes on from where it departed, without its steps since then"
        )
        return base, False

    def _placed(self, vector: Vector, params: PyTree) -> PyTree:
        def place(new: Any, old: Any) -> jax.Array:
            # A copy: an array of JAX may share the host's memory, and be donated.
            new = np.array(new, old.dtype)
            return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else jax.device_put(new)

        return jax.tree.map(place, self._code.tree(vector), params)

    def _keep(self, record: bytes) -> None:
        """Writes the record, so that it is there even after a loss of power, before anything that follows."""
        write_whole(self._folder / _RECORD, record, follow=False)
        number = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def _raise(self) -> None:
        if self._lock is None:
            raise RuntimeError("an island takes part within `with gradcomp_jax.islands.join(...) as island:`")
        if self._island.error is not None:
            raise self._island.error

    def _serve(self) -> None:
        """Does what the island asks for, until it has left or is stopped."""
        loop, answer = self._island.run(), None
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
            self._island.error = error
