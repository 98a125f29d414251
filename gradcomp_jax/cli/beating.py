"""A listener that tells the watchdog of every event of a run."""

from collections.abc import Callable

from gradcomp_jax.distributed import Watchdog
from gradcomp_jax.experiments import Listener


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
