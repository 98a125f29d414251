"""Exchanges that did not take place: what follows them must know, and who looks on must hear."""

import collections
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _checks
from gradcomp_jax._typing import Array
from gradcomp_jax.per_device import nodes_of
from gradcomp_jax.transforms.exchange import ExchangeState


def took_place(before: Any, after: Any) -> Array:
    """Returns whether every exchange of a state went on from ``before`` to ``after``: boolean scalar, equal on all workers."""
    states = [nodes_of(s, lambda node: isinstance(node, ExchangeState)) for s in (before, after)]
    if not states[0]:
        raise ValueError("there is no exchange in this transformation: put a gradcomp_jax.exchange or a method inside")
    skipped = [b.skipped != a.skipped for b, a in zip(*states, strict=True)]
    return ~jnp.stack(skipped).any()


def keep_if(ok: Array, new: Any, old: Any) -> Any:
    """Returns new values where the exchange took place, old ones where it was skipped."""
    return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)


class SkipWatch:
    """Warns once, on the host, when many steps in a row were skipped.

    Reads the counts of steps that are done, whose numbers are there, and so waits for nothing::

        watch = SkipWatch()
        for batch in batches:
            state, metrics = step(state, batch)
            watch(metrics["skipped"])
    """

    def __init__(self, in_a_row: int = 25) -> None:
        """Begins to watch.

        Args:
            in_a_row: how many skipped steps in a row are told. A loss scale that settles skips fewer.

        Raises:
            ValueError: for a number below 1.
        """
        self._most = _checks.positive_int("in_a_row", in_a_row)
        self._coming: collections.deque[Any] = collections.deque()
        self._last: float | None = None
        self._row = 0
        self._told = False

    def __call__(self, skipped: Any) -> None:
        """Takes ``metrics["skipped"]`` of a step: how many exchanges were skipped so far, a number or one for each worker."""
        if self._told:
            return
        if isinstance(skipped, jax.Array):
            # Of several processes each reads its own: all workers count alike. The copy is on its way when it is read.
            skipped = skipped.addressable_data(0)
            skipped.copy_to_host_async()
        self._coming.append(skipped)
        while self._coming and getattr(self._coming[0], "is_ready", lambda: True)():
            self._read(self._coming.popleft())

    def _read(self, skipped: Any) -> None:
        count = float(np.max(np.asarray(skipped)))
        rises = self._last is not None and count > self._last
        self._last, self._row = count, self._row + 1 if rises else 0
        if self._row >= self._most and not self._told:
            self._told = True
            self._coming.clear()
            warnings.warn(
                f"{self._row} steps in a row were skipped on all workers: in each a gradient was not finite, or too large, and"
                " training stands still. Look for a NaN or an infinity in the loss and the parameters, and lower the learning"
                " rate; gradcomp_jax.reset_nonfinite(state) mends a state that came from elsewhere",
                stacklevel=3,
            )
