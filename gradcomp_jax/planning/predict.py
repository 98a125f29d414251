"""What a step takes with a method on a cluster, and whether it is worth it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gradcomp_jax import _checks
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.planning import costs
from gradcomp_jax.planning.calibrate import Calibration
from gradcomp_jax.planning.links import Cluster, Link
from gradcomp_jax.planning.prices import BASELINES, Price, Prices, checked
from gradcomp_jax.planning.traffic import CollectiveTraffic, Traffic, read_method
from gradcomp_jax.planning.workload import Device, Workload

Layout = Literal["flat", "hierarchical"]
TrafficOf = Callable[[str, Sequence[tuple[int, ...]], int], Traffic]

CLEAR = 1.05
"""How much faster than the better dense baseline a method must be before it is worth what it does to the gradient; also the
difference that a plan can tell: see :attr:`Verdict.tie`."""

FORMULAS_OFF = 0.263
"""Median error of a step that is predicted without a calibration, over the measured steps that ``benchmarks/planner.py`` holds
predictions against; it prints the figure."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step of every worker, in seconds.

    Attributes:
        method: a name in :data:`gradcomp_jax.methods.METHODS`.
        layout: ``flat``, one exchange of all workers; ``hierarchical``, dense within a node and this method between them.
        compute: of the workload.
        compress: arithmetic of the method.
        inner: on the links within nodes.
        outer: on the links between nodes.
        exposed: of ``inner`` and ``outer``, what computation does not hide.
        sent: bytes that leave a node in a step.
        state: bytes of memory that the method keeps on each worker.
        price: how many steps the method needs for what dense reaches, where that is known; of a baseline it is not asked.
        warm_up: what the dense steps of a warm-up add to each step of a run, on average; below 0 where these are faster.
    """

    method: str
    layout: Layout
    compute: float
    compress: float
    inner: float
    outer: float
    exposed: float
    sent: float
    state: float
    price: Price | None = None
    warm_up: float = 0.0

    @property
    def step(self) -> float:
        """Returns the seconds from one step to the next, after a warm-up."""
        return self.compute + self.compress + self.exposed

    @property
    def progress(self) -> float:
        """Returns the seconds in which it comes as far as dense in a step: the mean step of a run times the price, if any."""
        return self.step if self.price is None else (self.step + self.warm_up) * self.price.factor


class _Communication(NamedTuple):
    """Fields of a :class:`Prediction` that depend on the layout."""

    inner: float
    outer: float
    sent: float
    state: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether to compress.

    Attributes:
        compress: whether a method beats the better dense one by more than :data:`CLEAR`, by :attr:`Prediction.progress`.
        method: what to use: the fastest such method that has a price, where none has one the fastest, or the better dense one.
        gain: what the better dense one takes over what that method does, by :attr:`Prediction.progress`; where dense is to be
            used, over the least that any takes.
        ranking: all predictions, the least :attr:`Prediction.progress` first; where some have prices, methods without one come
            after all others.
        skipped: why there is none of a method that was asked for, by method.
    """

    compress: bool
    method: str
    gain: float
    ranking: tuple[Prediction, ...]
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def tie(self) -> bool:
        """Returns whether the fastest method and the better dense one differ by less than a plan can tell."""
        return is_tie({p.method: p.progress for p in self.ranking}, BASELINES)

    @property
    def trains_worse(self) -> Prediction | None:
        """Returns the method that seconds alone would recommend, where prices have another one recommended or none.

        Its own price is None where no run shows how it trains.
        """
        by_seconds = sorted(self.ranking, key=lambda p: p.step)
        dense = next((p for p in by_seconds if p.method in BASELINES), None)
        if dense is None or not by_seconds[0].step or dense.step / by_seconds[0].step < CLEAR:
            return None
        return None if by_seconds[0].method == self.method else by_seconds[0]


def is_tie(steps: Mapping[str, float], baselines: Iterable[str]) -> bool:
    """Returns whether the fastest method and the fastest baseline are within :data:`CLEAR` of each other.

    Args:
        steps: seconds of a step by method.
        baselines: which of them are dense.
    """
    dense = set(baselines)
    plain = min((step for name, step in steps.items() if name in dense), default=0.0)
    best = min((step for name, step in steps.items() if name not in dense), default=0.0)
    return best > 0 and 1 / CLEAR < plain / best < CLEAR


def predict(
    workload: Workload,
    cluster: Cluster,
    method: str,
    *,
    device: Device | None = None,
    calibration: Calibration | None = None,
    layout: Layout | None = None,
    traffic: TrafficOf | None = None,
    prices: Prices | None = None,
) -> Prediction:
    r"""Predicts a step: computation, compression, and communication as far as computation does not hide it.

    With :math:`c` the seconds of communication and :math:`o` the fraction of the computation that it may run beside, what is
    exposed is :math:`\max(0, c - o \cdot compute)`; compression is never hidden.

    Args:
        workload: of one worker.
        cluster: what joins the workers.
        method: a name in :data:`gradcomp_jax.methods.METHODS`, with its default options.
        device: how fast it compresses; by default that of the calibration, or one that copies a terabyte a second.
        calibration: measured times of collectives in place of the formulas and the outer link's rate and latency: of as many
            workers as exchange, or, made along the axis of the nodes of a mesh with another for the devices of each, between
            nodes. Then devices of a node shared the link while it was made, as they do in the exchange.
        layout: by default the faster one, where a node has several workers.
        traffic: ``traffic(method, shapes, workers)``; by default what the method says of itself. Without a calibration dense
            bfloat16 takes what is faster of that and one all-reduce.
        prices: how many times dense's steps a method needs, by name; by default what the package's own runs gave. ``{}``
            for seconds alone.

    Raises:
        ValueError: for an unknown method or layout, or a calibration for another number of workers.

    References:
        Wen et al., 2017, https://arxiv.org/abs/1705.07878, section 5.3; Lin et al., 2018, https://arxiv.org/abs/1712.01887,
        section 5 (a light profile of one node, an analytical model of the network); collectives as in
        :mod:`gradcomp_jax.planning.costs`.
    """
    if layout is None:
        layouts: list[Layout] = ["flat", "hierarchical"] if cluster.per_node > 1 else ["flat"]
        if calibration is not None and cluster.per_node > 1 and calibration.workers == cluster.nodes:
            # It is of the exchange between nodes, and knows nothing of one among all workers.
            layouts = ["hierarchical"]
        elif calibration is not None:
            layouts = ["flat"]
        ask = functools.partial(predict, workload, cluster, method, device=device, calibration=calibration)
        found = [ask(layout=one, traffic=traffic, prices=prices) for one in layouts]
        return min(found, key=lambda p: p.step)
    _checks.one_of("method", method, METHODS)
    _checks.one_of("layout", layout, ("flat", "hierarchical"))
    if calibration is not None:
        calibration.refuse_other_workers(cluster.nodes if layout == "hierarchical" else cluster.workers)
    across = _hierarchical if layout == "hierarchical" else _flat
    described = [traffic or read_method]
    if traffic is None and method == "dense_bf16" and calibration is None:
        described.append(_all_reduced)
    ways = [across(workload, cluster, method, calibration, way) for way in described]
    communication = min(ways, key=lambda way: way.inner + way.outer)
    compress = 0.0
    if cluster.workers > 1:
        values = workload.values / (cluster.per_node if layout == "hierarchical" else 1)
        known = device or (calibration.device if calibration else None) or Device()
        compress = known.compression(method, round(values))
    exposed = max(0.0, communication.inner + communication.outer - workload.overlap * workload.compute)
    price = None if method in BASELINES else checked(prices).get(method)
    one = Prediction(
        method, layout, workload.compute, compress, exposed=exposed, price=price, **communication._asdict()
    )
    if price is None or not price.dense_steps:
        return one
    ask = functools.partial(predict, workload, cluster, device=device, calibration=calibration, traffic=traffic)
    try:
        dense = ask("dense")
    except ValueError:  # A calibration may know the collectives of bfloat16 alone.
        dense = ask("dense_bf16")
    return dataclasses.replace(one, warm_up=price.dense_steps * (dense.step - one.step))


def should_compress(
    workload: Workload,
    cluster: Cluster,
    *,
    methods: Iterable[str] | None = None,
    device: Device | None = None,
    calibration: Calibration | None = None,
    prices: Prices | None = None,
) -> Verdict:
    """Predicts all methods, and says whether one is worth it: seconds of a step, times the steps that it needs.

    A method that cannot be predicted, because the calibration has not measured a collective of it or it refuses the shapes, is
    left out, with the reason in :attr:`Verdict.skipped`.

    Args:
        workload: of one worker.
        cluster: what joins the workers.
        methods: names; all by default. The dense baselines are always among them.
        device: see :func:`predict`.
        calibration: see :func:`predict`.
        prices: see :func:`predict`.

    Raises:
        ValueError: for an unknown method, a price that is none, and where no dense baseline can be predicted.
    """
    prices = checked(prices)
    names = dict.fromkeys([*BASELINES, *(METHODS if methods is None else methods)])
    found, skipped = [], {}
    for name in names:
        _checks.one_of("method", name, METHODS)
        try:
            found.append(predict(workload, cluster, name, device=device, calibration=calibration, prices=prices))
        except ValueError as error:
            if name == BASELINES[-1] and not found:
                raise
            skipped[name] = str(error)
    priced = any(p.price for p in found)

    def unknown(p: Prediction) -> bool:
        return priced and p.price is None and p.method not in BASELINES

    # That no run shows how a method trains must not be what recommends it.
    ranking = tuple(sorted(found, key=lambda p: (unknown(p), p.progress, p.step)))
    dense = next(p for p in ranking if p.method in BASELINES)
    paying = [p for p in ranking if p.method not in BASELINES and p.progress and dense.progress / p.progress >= CLEAR]
    best = paying[0] if paying else min(ranking, key=lambda p: p.progress)
    gain = dense.progress / best.progress if best.progress else 1.0
    compress = best.method not in BASELINES and gain >= CLEAR
    return Verdict(compress, best.method if compress else dense.method, gain, ranking, skipped)


def speed_up(prediction: Prediction, workers: int) -> float:
    """Returns examples a second of all workers over those of one: weak scaling, each worker's batch stays."""
    return workers * prediction.compute / prediction.step if prediction.step else float(workers)


def _flat(
    workload: Workload, cluster: Cluster, method: str, calibration: Calibration | None, traffic: TrafficOf
) -> _Communication:
    """All workers in one exchange; the devices of a node share its outer link for what leaves it."""
    found = traffic(method, workload.shapes, cluster.workers)
    if calibration is not None:
        return _Communication(0.0, measured(calibration, found.collectives), found.sent, found.state)
    if cluster.nodes == 1 and cluster.inner is not None:
        return _Communication(
            _modelled(found.collectives, cluster.workers, cluster.inner, cluster), 0.0, 0.0, found.state
        )
    leaving = [c._replace(sent=c.sent * _leaving(c.kind, cluster)) for c in found.collectives]
    outer = _modelled(leaving, cluster.workers, cluster.outer, cluster)
    if cluster.inner is not None:
        # Rings and pairs have links of both kinds in them: the slower one holds them up.
        outer = max(outer, _modelled(found.collectives, cluster.workers, cluster.inner, cluster))
    return _Communication(0.0, outer, sum(c.sent for c in leaving), found.state)


def _all_reduced(method: str, shapes: Sequence[tuple[int, ...]], workers: int) -> Traffic:
    """A method's bytes in one sum, which has fewer messages than two phases; of dense bfloat16 they are the same."""
    found = read_method(method, tuple(shapes), workers)
    sent = sum(c.sent for c in found.collectives)
    return dataclasses.replace(found, collectives=(CollectiveTraffic("all-reduce", 1, sent),) if sent else ())


def _hierarchical(
    workload: Workload, cluster: Cluster, method: str, calibration: Calibration | None, traffic: TrafficOf
) -> _Communication:
    """A dense reduce-scatter within nodes, the method between them on a shard for each device, a dense all-gather within."""
    assert cluster.inner is not None
    found = traffic(method, _shards(workload.shapes, cluster.per_node), cluster.nodes)
    # The devices of a node exchange their shards at the same time, over the same link.
    leaving = [c._replace(sent=c.sent * cluster.per_node) for c in found.collectives]
    inner = costs.hierarchical(1, cluster.per_node, 4 * workload.values, cluster.inner, 0.0)
    if calibration is not None:
        outer = measured(calibration, found.collectives)
    else:
        outer = _modelled(leaving, cluster.nodes, cluster.outer, cluster)
    return _Communication(inner, outer, sum(c.sent for c in leaving), found.state)


@functools.lru_cache(maxsize=64)
def _shards(shapes: tuple[tuple[int, ...], ...], parts: int) -> tuple[tuple[int, ...], ...]:
    """A device's part of each tensor: so many rows of it as a matrix, its last dimension against all others."""
    return tuple(
        (math.ceil(math.prod(shape[:-1]) / parts), shape[-1])
        if len(shape) > 1
        else (math.ceil(math.prod(shape) / parts),)
        for shape in shapes
    )


def _leaving(kind: str, cluster: Cluster) -> float:
    """Bytes on a node's link for each byte that one of its devices sends.

    Rings go through every node once, whatever is in it: one byte. In an all-to-all every device of a node sends over its link,
    to all that are not in the node.
    """
    if kind not in ("all-to-all", "reduce-scatter"):
        return 1.0
    return cluster.per_node * (cluster.workers - cluster.per_node) / (cluster.workers - 1)


def _modelled(collectives: Sequence[CollectiveTraffic], workers: int, link: Link, cluster: Cluster) -> float:
    ring = cluster.topology == "ring"
    return sum(
        c.launches * costs.collective(c.kind, workers, c.sent / c.launches, link, ring=ring)
        for c in collectives
        if c.launches
    )


def measured(calibration: Calibration, collectives: Sequence[CollectiveTraffic]) -> float:
    """Returns the seconds of collectives one after the other, by a calibration."""
    return sum(c.launches * calibration.seconds(c.kind, c.sent / c.launches) for c in collectives if c.launches)
