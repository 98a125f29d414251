"""What was decided in a run of islands, as plain data."""

from collections.abc import Mapping
from typing import Any

from gradcomp_jax import _arguments
from gradcomp_jax.islands import keys
from gradcomp_jax.islands.log import read_decision
from gradcomp_jax.islands.objects import Decision
from gradcomp_jax.islands.store import StoreError, open_store

_AT_ONCE = 16
"""Decisions that are asked for side by side, because a store may be far."""


@_arguments.checked
def history(place: Any, *, store_options: Mapping[str, Any] | None = None) -> tuple[Decision, ...]:
    """Returns the decisions of a run, the first round first: who took part in which. It reads, and writes nothing.

    It needs neither parameters nor a code, because it reads no payloads.

    Example:
        >>> store = gc.islands.MemoryStore()
        >>> code = gc.compressors.block_quantized(bits=4)
        >>> with gc.islands.join(store, params, name="london", folder=folder, compressor=code, poll=0.01) as island:
        ...     params = island.begin(params)
        ...     island.close(params)
        True
        >>> [(d.round, [e.island for e in d.entries], d.members) for d in gc.islands.history(store)]
        [(1, ['london'], ('london',))]

    Args:
        place: as for :func:`join`; a folder that is not there is not made.
        store_options: as for :func:`join`.

    Returns:
        A :class:`Decision` for each round.

    Raises:
        StoreError: if the store is away, or there is no run yet; try again later.
        IslandError: if an object in the place of a decision is none.
    """
    store = open_store(place, make=False, **(store_options or {}))
    if store.get(keys.CONFIGURATION) is None:
        raise StoreError("there is no run yet")
    found: list[Decision] = []
    while True:
        # By their numbers: a list of names may lack some that are there.
        numbers = range(len(found) + 1, len(found) + 1 + _AT_ONCE)
        for number, data in zip(numbers, store.get_all(tuple(map(keys.round_key, numbers))), strict=True):
            if data is None:
                return tuple(found)
            found.append(read_decision(data, number))
