"""Skipped exchanges: how later transformations see them, and a warning for the user."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _checks
from gradcomp_jax._typing import Array
from gradcomp_jax.core.exchange import ExchangeState
from gradcomp_jax.per_device import nodes_of


def took_place(before: Any, after: Any) -> Array:
    """Returns whether no exchange was skipped between two states: boolean scalar, equal on all workers."""
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

    It reads only the counts of finished steps, so it never waits::

        watch = SkipWatch()
        for batch in batches:
            state, metrics = step(state, batch)
            watch(metrics["skipped"], metrics.get("loss_scale"))
    """

    def __init__(self, in_a_row: int = 25) -> None:
        """Starts the watch.

        Args:
            in_a_row: how many skipped steps in a row cause a warning. A loss scale that settles skips fewer.

        Raises:
            ValueError: for a number below 1.
        """
        self._most = _checks.positive_int("in_a_row", in_a_row)
        self._coming: collections.deque[tuple[Any, Any]] = collections.deque()
        self._last: float | None = None
        self._scale: float | None = None
        self._row = 0
        self._told = False

    def __call__(self, skipped: Any, loss_scale: Any = None) -> None:
        """Takes the number of exchanges skipped so far after a step, and the loss scale if there is one.

        Args:
            skipped: ``metrics["skipped"]``: a number, or one for each worker.
            loss_scale: ``metrics["loss_scale"]``: likewise, or ``None``.
        """
        if self._told:
            return
        self._coming.append((_coming(skipped), None if loss_scale is None else _coming(loss_scale)))
        while self._coming and all(getattr(x, "is_ready", lambda: True)() for x in self._coming[0]):
            self._read(*self._coming.popleft())

    def _read(self, skipped: Any, loss_scale: Any) -> None:
        count = float(np.max(np.asarray(skipped)))
        scale = None if loss_scale is None else float(np.max(np.asarray(loss_scale)))
        rises = self._last is not None and count > self._last
        falls = scale is not None and self._scale is not None and scale < self._scale
        self._last, self._row, self._scale = count, self._row + 1 if rises else 0, scale
        if self._row >= self._most and not self._told:
            self._told = True
            self._coming.clear()
            _checks.warn(
                f"{self._row} steps in a row were skipped on all workers: in each a gradient was not finite, or too large, and"
                f" training stands still. {_remedy(scale, falls)}"
            )


def _coming(number: Any) -> Any:
    if isinstance(number, jax.Array):
        # Each process reads its own count: all workers count alike. The copy to the host starts now and is read later.
        number = number.addressable_data(0)
        number.copy_to_host_async()
    return number


def _remedy(scale: float | None, falls: bool) -> str:
    if falls:
        return (
            f"The loss scale falls with each of them and is {scale:g} now: if it goes on falling, nothing is wrong but where it"
            " began; give gradcomp_jax.dynamic_loss_scale a lower initial= or maximum=, or a larger factor="
        )
    least = "" if scale is None else f"It is not the loss scale, which is {scale:g} and falls no more. "
    return (
        f"{least}Look for a NaN or an infinity in the loss and the parameters, and lower the learning rate;"
        " gradcomp_jax.reset_nonfinite(state) mends a state that came from elsewhere"
    )
