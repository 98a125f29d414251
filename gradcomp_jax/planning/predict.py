"""Predicts how long a step takes with a method on a cluster, and whether the method is worth it."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Literal

from gradcomp_jax import _arguments, _checks
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.planning.calibrate import Calibration
from gradcomp_jax.planning.communication import Communication, TrafficOf, all_reduced, flat, hierarchical
from gradcomp_jax.planning.links import Cluster
from gradcomp_jax.planning.prices import BASELINES, Price, Prices, checked
from gradcomp_jax.planning.traffic import read_method
from gradcomp_jax.planning.workload import Device, Workload

Layout = Literal["flat", "hierarchical"]

CLEAR = 1.05
"""How much faster than the better dense baseline a method must be to be worth what it does to the gradient. It is also the
smallest difference that a plan can tell: see :attr:`Verdict.tie`."""

FORMULAS_OFF = 0.263
"""Median error of a step that is predicted without a calibration, over the measured steps to which ``benchmarks/planner.py``
compares predictions; it prints the figure."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Holds the predicted times of a step of every worker, in seconds.

    Attributes:
        method: a name in :data:`gradcomp_jax.methods.METHODS`.
        layout: ``flat``, one exchange of all workers; ``hierarchical``, dense within a node and this method between them.
        compute: seconds of the workload's computation.
        compress: seconds of the method's arithmetic.
        inner: seconds on the links within nodes.
        outer: seconds on the links between nodes.
        exposed: the part of ``inner`` and ``outer`` that computation does not hide.
        sent: bytes that leave a node in a step.
        state: bytes of memory that the method keeps on each worker.
        price: how many steps the method needs to reach what dense reaches, if known; a baseline has none.
        figures: whose figures ``compress`` is of, and how they were found: ``v5e, compiled``.
        warm_up: what the dense steps of a warm-up add to each step of a run, on average; below 0 if dense steps are faster.
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
    figures: str = ""

    @property
    def step(self) -> float:
        """Returns the seconds from one step to the next, after a warm-up."""
        return self.compute + self.compress + self.exposed

    @property
    def progress(self) -> float:
        """Returns the seconds to come as far as dense in one step: the mean step of a run times the price, if there is one."""
        return self.step if self.price is None else (self.step + self.warm_up) * self.price.factor


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Says whether to compress.

    Attributes:
        compress: whether a method beats the better dense one by more than :data:`CLEAR`, by :attr:`Prediction.progress`.
        method: what to use: the fastest such method whose runs came as far as dense, or, if prices are left out
            (``prices={}``), the fastest such method; otherwise the better dense one.
        gain: :attr:`Prediction.progress` of the better dense one, divided by that of the method to use; if dense is to be used,
            divided by the least of any method.
        ranking: all predictions, the least :attr:`Prediction.progress` first; unless prices are left out, methods whose price
            is a lower bound come after these, and methods without a price last.
        skipped: for each method that was asked for and has no prediction, why.
        weighed: whether the number of steps counts, so that a method without a price is not recommended; false with
            ``prices={}``.
    """

    compress: bool
    method: str
    gain: float
    ranking: tuple[Prediction, ...]
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    weighed: bool = False

    @property
    def known(self) -> tuple[Prediction, ...]:
        """Returns the predictions of methods whose runs came as far as dense; all predictions if steps do not count."""
        return tuple(p for p in self.ranking if not (self.weighed and doubt(p)))

    @property
    def tie(self) -> bool:
        """Returns whether the fastest known method and the better dense one differ by less than a plan can distinguish."""
        return is_tie({p.method: p.progress for p in self.known}, BASELINES)

    @property
    def trains_worse(self) -> Prediction | None:
        """Returns the method that seconds alone would recommend, if prices lead to another recommendation or none.

        Its price is None if no run shows how it trains.
        """
        by_seconds = sorted(self.ranking, key=lambda p: p.step)
        dense = next((p for p in by_seconds if p.method in BASELINES), None)
        if dense is None or not by_seconds[0].step or dense.step / by_seconds[0].step < CLEAR:
            return None
        return None if by_seconds[0].method == self.method else by_seconds[0]


def doubt(prediction: Prediction) -> int:
    """Returns 0 if runs show that the method comes as far as dense, 1 if they did not come so far, 2 without runs."""
    if prediction.method in BASELINES:
        return 0
    return 2 if prediction.price is None else int(not prediction.price.reached)


def is_tie(steps: Mapping[str, float], baselines: Iterable[str]) -> bool:
    """Returns whether the fastest method and the fastest baseline are within :data:`CLEAR` of each other."""
    dense = set(baselines)
    plain = min((step for name, step in steps.items() if name in dense), default=0.0)
    best = min((step for name, step in steps.items() if name not in dense), default=0.0)
    return best > 0 and 1 / CLEAR < plain / best < CLEAR


@_arguments.checked
def predict(
    workload: Workload,
    cluster: Cluster,
    method: str,
    *,
    device: Device | str | None = None,
    calibration: Calibration | None = None,
    layout: Layout | None = None,
    traffic: TrafficOf | None = None,
    prices: Prices | None = None,
    task: str | None = None,
    optimizer: str | None = None,
) -> Prediction:
    r"""Predicts a step: computation, compression, and the communication that computation does not hide.

    With :math:`c` the seconds of communication and :math:`o` the fraction of the computation during which it may run, the
    exposed part is :math:`\max(0, c - o \cdot compute)`; compression is never hidden.

    Example:
        >>> workload = gc.Workload(compute=0.2, shapes=((4096, 4096),) * 8)
        >>> cluster = gc.Cluster(workers=8, outer=gc.Link.of_bits(1e9, latency=50e-6))
        >>> dense, dgc = (gc.predict(workload, cluster, name).step for name in ("dense", "dgc"))  # seconds
        >>> dgc < dense
        True

    Args:
        workload: the workload of one worker.
        cluster: the workers and their links.
        method: a name in :data:`gradcomp_jax.methods.METHODS`, with its default options.
        device: how fast a device compresses, or the name of its platform in :data:`gradcomp_jax.planning.PLATFORMS`; by default
            that of the calibration, or that of the devices that JAX finds.
        calibration: measured times of collectives, used instead of the formulas and the outer link's rate and latency. It is of
            the same number of workers, or of the exchange between nodes: made along the axis of the nodes, on a mesh with
            another axis for the devices of each node. The devices of a node then shared the link as they do in the exchange.
        layout: by default, if a node has several workers, the faster layout among those that have a price.
        traffic: ``traffic(method, shapes, workers)``; by default from the method's own description. Without a calibration,
            dense bfloat16 takes the faster of that and one all-reduce.
        prices: how many times the steps of dense a method needs, by name; by default from the package's own runs with this
            task, this optimizer and at least half as many workers. ``{}`` for seconds alone.
        task: kind of model: ``conv``, ``transformer`` or ``lstm``; by default that of the workload. If it is unknown, the
            highest price of all kinds counts.
        optimizer: the optimizer that follows the exchange, of :data:`gradcomp_jax.planning.task.OPTIMIZERS`; by default that of
            the runs, whatever it was.

    Returns:
        A :class:`~gradcomp_jax.planning.Prediction`, in seconds.

    Raises:
        ValueError: for an unknown method, layout, task or optimizer, or a calibration for another number of workers.

    References:
        Wen et al., 2017, https://arxiv.org/abs/1705.07878, section 5.3; Lin et al., 2018, https://arxiv.org/abs/1712.01887,
        section 5 (a light profile of one node, an analytical model of the network); collectives as in
        :mod:`gradcomp_jax.planning.costs`.
    """
    ask = functools.partial(predict, workload, cluster, device=device, calibration=calibration, traffic=traffic)
    if layout is None:
        layouts: list[Layout] = ["flat", "hierarchical"] if cluster.per_node > 1 else ["flat"]
        if calibration is not None:
            # One of the exchange between nodes says nothing about one among all workers.
            layouts = layouts[-1:] if calibration.workers == cluster.nodes else ["flat"]
        found = [ask(method, layout=one, prices=prices, task=task, optimizer=optimizer) for one in layouts]
        # Layouts that runs say something about go first: more runs are comparable with the nodes than with all devices.
        return min(found, key=lambda p: (prices != {} and doubt(p), p.progress))
    _checks.one_of("method", method, METHODS)
    _checks.one_of("layout", layout, ("flat", "hierarchical"))
    if calibration is not None:
        calibration.refuse_other_workers(cluster.nodes if layout == "hierarchical" else cluster.workers)
    across = hierarchical if layout == "hierarchical" else flat
    known = Device.of(device, calibration.device if calibration else None)
    values = round(workload.values / (cluster.per_node if layout == "hierarchical" else 1))

    def costs(way: TrafficOf) -> tuple[float, float, Communication]:
        """Returns the seconds of the arithmetic and of what sticks out, and the communication."""
        found = across(workload, cluster, method, calibration, way)
        compress = 0.0
        if cluster.workers > 1:
            compress = known.compression(method, values, workload.tensors, all_reduced=way is all_reduced)
        return compress, max(0.0, found.inner + found.outer - workload.overlap * workload.compute), found

    described = [traffic or read_method]
    if traffic is None and method == "dense_bf16" and calibration is None:
        described.append(all_reduced)
    compress, exposed, communication = min(map(costs, described), key=lambda cost: cost[0] + cost[1])
    exchanging = cluster.nodes if layout == "hierarchical" else cluster.workers
    known_prices = checked(prices, task=task or workload.task, optimizer=optimizer, workers=exchanging)
    price = None if method in BASELINES else known_prices.get(method)
    one = Prediction(
        method,
        layout,
        workload.compute,
        compress,
        exposed=exposed,
        price=price,
        figures=f"{known.known.name}, {known.basis(method)}",
        **communication._asdict(),
    )
    if price is None or not price.dense_steps:
        return one
    try:
        dense = ask("dense", prices={})
    except ValueError:  # A calibration may have only the collectives of bfloat16.
        dense = ask("dense_bf16", prices={})
    return dataclasses.replace(one, warm_up=price.dense_steps * (dense.step - one.step))


@_arguments.checked
def should_compress(
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
) -> Verdict:
    """Predicts all methods, and says whether one is worth it: seconds of a step, times the steps that it needs.

    A method has a price if runs with this task, this optimizer and a comparable number of workers show how it trains. A method
    without a price is not recommended, nor is one whose runs did not come as far as dense. A method is left out if it cannot be
    predicted, because the calibration lacks one of its collectives or the method refuses the shapes, or if its state does not
    fit into a device. The reason is in :attr:`Verdict.skipped`.

    Example:
        >>> workload = gc.Workload(compute=0.2, shapes=((4096, 4096),) * 8)
        >>> cluster = gc.Cluster(workers=8, outer=gc.Link.of_bits(1e9, latency=50e-6))
        >>> verdict = gc.should_compress(workload, cluster)
        >>> type(verdict).__name__
        'Verdict'

    Args:
        workload: the workload of one worker.
        cluster: the workers and their links.
        methods: names; all by default. The dense baselines are always included.
        device: see :func:`predict`.
        calibration: see :func:`predict`.
        prices: see :func:`predict`.
        task: see :func:`predict`.
        optimizer: see :func:`predict`.
        device_memory: bytes of a device; a method whose state alone is larger is left out.

    Returns:
        A :class:`~gradcomp_jax.planning.Verdict`, with the methods in the order of their rank.

    Raises:
        ValueError: for an unknown method, task or optimizer, an invalid price, and if no dense baseline can be
            predicted.
    """
    checked(prices, task=task, optimizer=optimizer)
    ask = functools.partial(predict, workload, cluster, device=device, calibration=calibration, prices=prices)
    names = dict.fromkeys([*BASELINES, *(METHODS if methods is None else methods)])
    found: list[Prediction] = []
    skipped: dict[str, str] = {}
    for name in names:
        _checks.one_of("method", name, METHODS)
        try:
            one = ask(name, task=task, optimizer=optimizer)
        except ValueError as error:
            if name == BASELINES[-1] and not found:
                raise
            skipped[name] = str(error)
            continue
        if device_memory is not None and one.state > device_memory:
            skipped[name] = (
                f"its state of {one.state:,.0f} bytes does not fit into the {device_memory:,.0f} of a device"
            )
            continue
        found.append(one)

    # A method must not be recommended because no run shows how it trains, or because no run came as far as dense.
    weighed = prices != {}
    ranking = tuple(sorted(found, key=lambda p: (weighed and doubt(p), p.progress, p.step)))
    dense = next(p for p in ranking if p.method in BASELINES)
    best = ranking[0]
    gain = dense.progress / best.progress if best.progress else 1.0
    compress = best.method not in BASELINES and gain >= CLEAR
    return Verdict(compress, best.method if compress else dense.method, gain, ranking, skipped, weighed)


def speed_up(prediction: Prediction, workers: int) -> float:
    """Returns the examples a second of all workers over those of one (weak scaling: the batch of a worker stays the same)."""
    return workers * prediction.compute / prediction.step if prediction.step else float(workers)
