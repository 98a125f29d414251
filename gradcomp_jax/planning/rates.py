"""The rate of a link above which the better dense baseline is faster than a method."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from gradcomp_jax.planning.links import Cluster, Link
from gradcomp_jax.planning.predict import predict
from gradcomp_jax.planning.prices import BASELINES, Prices
from gradcomp_jax.planning.workload import Device, Workload

_SLOWEST, _FASTEST = 1e2, 1e13  # the bounds of the search for a break-even, bytes a second


def break_even(
    workload: Workload,
    cluster: Cluster,
    method: str,
    *,
    device: Device | str | None = None,
    prices: Prices | None = None,
    task: str | None = None,
    optimizer: str | None = None,
) -> float:
    """Returns the rate of the outer link, bytes a second, above which the better baseline is faster than the method.

    The rate is 0 if the method is never faster, and infinity if it always is. The one with less :attr:`Prediction.progress` is
    the faster one.

    The cluster may have any outer rate; its latency counts. Other arguments are those of :func:`predict`.
    """
    how: dict[str, Any] = {"device": device, "prices": prices, "task": task, "optimizer": optimizer}
    return break_evens(workload, cluster, [method], **how)[method]


def break_evens(workload: Workload, cluster: Cluster, methods: Iterable[str], **how: Any) -> dict[str, float]:
    """Returns :func:`break_even` for several methods, with its options."""

    def progress(name: str, rate: float) -> float:
        there = dataclasses.replace(cluster, outer=Link(rate, cluster.outer.latency))
        return predict(workload, there, name, **how).progress

    @functools.cache
    def dense(rate: float) -> float:
        return min(progress(name, rate) for name in BASELINES)

    def wins(method: str, rate: float) -> bool:
        return progress(method, rate) < dense(rate)

    return {method: _last_win(functools.partial(wins, method)) for method in methods}


def _last_win(wins: Callable[[float], bool]) -> float:
    """Returns the highest rate at which the method wins; 0 if it never wins, infinity if it always wins."""
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
