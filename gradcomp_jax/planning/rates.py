"""The rate of a link from which the better dense baseline is faster than a method."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

from gradcomp_jax.planning.links import Cluster, Link
from gradcomp_jax.planning.predict import predict
from gradcomp_jax.planning.prices import BASELINES, Prices
from gradcomp_jax.planning.workload import Device, Workload

_SLOWEST, _FASTEST = 1e2, 1e13  # bytes a second between which a break-even is looked for


def break_even(
    workload: Workload,
    cluster: Cluster,
    method: str,
    *,
    device: Device | None = None,
    prices: Prices | None = None,
    task: str | None = None,
    optimizer: str | None = None,
) -> float:
    """Returns the rate of the outer link, bytes a second, above which the better baseline is faster than the method.

    0 for a method that never is; infinity for one that always is. Faster is who needs less :attr:`Prediction.progress`.

    Args:
        workload: of one worker.
        cluster: with any outer rate; its latency counts.
        method: a name.
        device: see :func:`predict`.
        prices: see :func:`predict`.
        task: see :func:`predict`.
        optimizer: see :func:`predict`.
    """
    ask = functools.partial(break_evens, workload, cluster, [method], device=device, prices=prices)
    return ask(task=task, optimizer=optimizer)[method]


def break_evens(
    workload: Workload,
    cluster: Cluster,
    methods: Iterable[str],
    *,
    device: Device | None = None,
    prices: Prices | None = None,
    task: str | None = None,
    optimizer: str | None = None,
) -> dict[str, float]:
    """Returns :func:`break_even` of several methods."""

    def progress(name: str, rate: float) -> float:
        there = dataclasses.replace(cluster, outer=Link(rate, cluster.outer.latency))
        return predict(workload, there, name, device=device, prices=prices, task=task, optimizer=optimizer).progress

    @functools.cache
    def dense(rate: float) -> float:
        return min(progress(name, rate) for name in BASELINES)

    def wins(method: str, rate: float) -> bool:
        return progress(method, rate) < dense(rate)

    return {method: _last_win(functools.partial(wins, method)) for method in methods}


def _last_win(wins: Callable[[float], bool]) -> float:
    """The highest rate at which it does; 0 where it never does, infinity where it always does."""
    rates = [_SLOWEST * 10 ** (k / 3) for k in range(3 * round(math.log10(_FASTEST / _SLOWEST)) + 1)]
    last = next((k for k in reversed(range(len(rates))) if wins(rates[k])), None)
    if last is None:
        return 0.0
    if last == len(rates) - 1:
        return math.inf
    low, high = rates[last], rates[last + 1]
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low
