"""A plan as a whole: the verdict in words, break-even rates, and how it changes with workers and with the link."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from gradcomp_jax.planning.calibrate import Calibration
from gradcomp_jax.planning.links import Cluster, Link
from gradcomp_jax.planning.predict import Prediction, Verdict, predict, should_compress, speed_up
from gradcomp_jax.planning.prices import BASELINES, Prices
from gradcomp_jax.planning.rates import break_evens
from gradcomp_jax.planning.workload import Device, Workload

Curves = tuple[tuple[Any, ...], dict[str, tuple[float, ...]]]

OVERLAPPED = 2 / 3
"""About the fraction of the computation during which an exchange runs if its buckets leave during the backward pass."""
_SHOWN = 3  # methods in a picture, beside the baselines
_DECADES = 2  # of rates on each side of the link's own


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Holds all that a plan says.

    Attributes:
        workload: the workload that was asked about.
        cluster: the cluster that was asked about.
        verdict: the verdict on this cluster.
        break_even: bytes a second of the outer link above which the better dense baseline beats a method, by method; ``None``
            if the link is calibrated, because a calibration knows no other rate.
        device: the device whose arithmetic counts.
        overlapped: the verdict if an exchange may run during two thirds of the computation; ``None`` if it was not asked for.
        task: kind of model whose prices count; ``None`` if it is not known.
        optimizer: optimizer whose prices count; ``None`` for any.
        device_memory: bytes of a device, if known.
    """

    workload: Workload
    cluster: Cluster
    verdict: Verdict
    break_even: dict[str, float] | None
    device: Device
    overlapped: Verdict | None = None
    task: str | None = None
    optimizer: str | None = None
    device_memory: float | None = None

    @functools.cached_property
    def by_workers(self) -> Curves:
        """Returns numbers of workers, and by method the speed-up over one worker (weak scaling)."""
        sizes = _sizes(self.cluster)
        clusters = [dataclasses.replace(self.cluster, workers=n, per_node=min(self.cluster.per_node, n)) for n in sizes]
        return self._curves(clusters, sizes)

    @functools.cached_property
    def by_rate(self) -> Curves:
        """Returns rates of the outer link in bytes a second, and by method the same speed-up."""
        outer = self.cluster.outer
        own = outer.rate if math.isfinite(outer.rate) else 1.25e9
        rates = [own * 10 ** (k / 8) for k in range(-8 * _DECADES, 8 * _DECADES + 1)]
        clusters = [dataclasses.replace(self.cluster, outer=Link(rate, outer.latency)) for rate in rates]
        return self._curves(clusters, rates)

    def _curves(self, clusters: Sequence[Cluster], at: Sequence[Any]) -> Curves:
        ranked = [p.method for p in self.verdict.ranking]
        others = list(dict.fromkeys([self.best.method, *(name for name in ranked if name not in BASELINES)]))
        found = {
            name: tuple(
                speed_up(predict(self.workload, one, name, device=self.device), one.workers) for one in clusters
            )
            for name in [*(b for b in BASELINES if b in ranked), *others[:_SHOWN]]
        }
        return tuple(at), found

    @property
    def dense(self) -> Prediction:
        """Returns the better dense baseline."""
        return next(p for p in self.verdict.ranking if p.method in BASELINES)

    @property
    def best(self) -> Prediction:
        """Returns the method that is recommended, or the first of the ranking."""
        methods = [p for p in self.verdict.ranking if p.method not in BASELINES]
        recommended = (p for p in methods if p.method == self.verdict.method)
        return next(recommended, methods[0])

    @property
    def has_curves(self) -> bool:
        """Returns whether there are curves: there are none for a calibrated link, or a step that computes nothing."""
        return self.break_even is not None and self.workload.compute > 0


def outlook(
    workload: Workload,
    cluster: Cluster,
    *,
    methods: Iterable[str] | None = None,
    device: Device | str | None = None,
    calibration: Calibration | None = None,
    prices: Prices | None = None,
    task: str | None = None,
    optimizer: str | None = None,
    device_memory: float | None = None,
    overlapped: bool = False,
) -> Outlook:
    """Returns the :class:`Outlook` of a workload on a cluster.

    With a calibration there are no break-even rates and no curves, because it knows one link and one number of workers.

    The arguments are those of :func:`gradcomp_jax.should_compress`, and ``overlapped``: whether to find that verdict too.

    Raises:
        ValueError: as :func:`gradcomp_jax.predict`, for a single worker, and if only baselines are given.
    """
    if cluster.workers < 2:
        raise ValueError("workers must be at least 2, got 1: one worker exchanges nothing")
    methods = None if methods is None else tuple(methods)
    if methods is not None and set(methods) <= set(BASELINES):
        raise ValueError(
            f"methods must name one to compare with {' and '.join(BASELINES)}, got {', '.join(methods) or 'none'}"
        )

    how: dict[str, Any] = {"prices": prices, "task": task, "optimizer": optimizer}
    limits: dict[str, Any] = {"methods": methods, "calibration": calibration, "device_memory": device_memory}
    speed = Device.of(device, calibration.device if calibration else None)
    ask = functools.partial(should_compress, cluster=cluster, device=speed, **limits, **how)
    verdict = ask(workload=workload)
    others = [p.method for p in verdict.ranking if p.method not in BASELINES]
    if not others:
        reasons = "; ".join(f"{name}: {why}" for name, why in verdict.skipped.items())
        raise ValueError(f"there is no prediction of any method but {' and '.join(BASELINES)}: {reasons}")
    even = None if calibration else break_evens(workload, cluster, others, device=speed, **how)
    beside = ask(workload=dataclasses.replace(workload, overlap=OVERLAPPED)) if overlapped else None
    return Outlook(workload, cluster, verdict, even, speed, beside, task or workload.task, optimizer, device_memory)


def _sizes(cluster: Cluster) -> list[int]:
    """Returns powers of two up to a few times the cluster's size, and that size itself."""
    most = min(1024, max(64, 4 * cluster.workers))
    sizes = {2**k for k in range(1, 11) if 2**k <= most} | {cluster.workers}
    return sorted(n for n in sizes if n <= cluster.per_node or n % cluster.per_node == 0)
