"""What a user has of an island: the steps of a training go through it, and the exchange is in a thread beside them."""

import time
from collections.abc import Mapping
from typing import Any

from gradcomp_jax._typing import PyTree
from gradcomp_jax.islands.exchanging import Exchanging
from gradcomp_jax.islands.host_codec import Codec
from gradcomp_jax.islands.processes import Processes


class Member:
    """Takes part in a run, for the training that calls :meth:`step`. Make one with :func:`join`, and use it with ``with``.

    Where the JAX program has several processes, all of them make the same calls in the same order; only :meth:`diagnostics` is
    free. Process 0 decides, and what it raises is raised in all of them.
    """

    def __init__(self, processes: Processes, exchanging: Exchanging | None, code: Codec, every: int) -> None:
        """Takes the processes of the island, and in the first of them what talks to the store."""
        self._processes, self._code, self._every = processes, code, every
        # Only what the first process decides touches it.
        self._exchanging: Any = exchanging
        self._within: bool | None = None
        self._begun = False
        self._steps, self._blocked = 0, 0.0

    def __enter__(self) -> "Member":
        """Starts the exchange, in a thread of its own."""
        if self._within is not None:
            raise RuntimeError("an island is joined once: call gradcomp_jax.islands.join again")
        self._processes.decide(lambda: (None, self._exchanging.start()), self._numbers)
        self._within = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends the exchange: what is under way and what was not sent stay in the folder of the island."""
        if error is None:
            self.close()
            return
        # The other processes may have raised something else, or nothing: nobody waits for them.
        self._within = False
        self._processes.give_up(error)
        if self._exchanging is not None:
            self._exchanging.end(None, 0.0)

    def begin(self, params: PyTree, *, timeout: float | None = None) -> PyTree:
        """Waits for the run's centre, and returns it in the place of the parameters.

        Args:
            params: the parameters, whose dtypes and shardings the result has.
            timeout: the most seconds to wait; for ever by default, because a store may be away.

        Raises:
            TimeoutError: if the store was away for so long.
            IslandError: if the run is another one.
        """
        self._check_within()
        _, x = self._processes.decide(lambda: (None, self._exchanging.begin(timeout)), self._numbers)
        self._begun = True
        return self._processes.placed(self._code, x, params)

    def step(self, params: PyTree) -> PyTree:
        r"""Returns the parameters to go on with; call it after every step of the training.

        ``every`` calls after the last payload it takes the parameters' distance from where it departed, which the exchange
        encodes and writes while training goes on. Where a round was decided in the meantime, the parameters move with the
        centre: :math:`x \leftarrow c + (x - b)`, where b is where they were at the departure. Several processes look for that
        every ``every // 8`` steps after the last payload, and at the step that is due; in between a call costs nothing.

        Raises:
            IslandError: if the island cannot take part any more. A store that is away raises nothing.
        """
        self._check_within()
        if not self._begun:
            raise RuntimeError("call begin(params) before the first step: an island starts from the run's centre")
        self._steps += 1
        processes, steps, every = self._processes, self._steps, self._every
        if not processes.meet(steps, every):
            return params
        news, _ = processes.decide(lambda: (self._exchanging.has_news(steps, every), None), self._numbers)
        if not news:
            return params
        started = time.monotonic()
        here = processes.gathered(self._code, params)
        (changed, departed), x = processes.decide(lambda: self._exchanging.exchange(here, steps, every), self._numbers)
        if departed:
            self._steps = 0
        params = processes.placed(self._code, x, params) if changed else params
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
        if not self._within:
            return False
        here = self._processes.gathered(self._code, params) if params is not None and self._begun else None
        all_sent, _ = self._processes.decide(lambda: (self._exchanging.end(here, timeout), None), self._numbers)
        self._within = False
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

        In each of several processes they are those of process 0 when the processes met last, so that a loop may end by them.
        """
        return self._processes.reported(self._numbers)

    def _numbers(self) -> Mapping[str, float]:
        numbers = self._exchanging.numbers() | {"blocked_seconds": self._blocked}
        return {f"island/{name}": value for name, value in numbers.items()}

    def _check_within(self) -> None:
        if not self._within:
            raise RuntimeError("an island takes part within `with gradcomp_jax.islands.join(...) as island:`")
