"""Chooses among candidates at the start of a run, by the measured times of its link."""

import dataclasses
import logging
import math
from collections.abc import Mapping

import jax
import optax
from jax.sharding import Mesh

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.made_by import made_by
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.methods.traffic import traffic_of
from gradcomp_jax.per_device import nodes_within
from gradcomp_jax.planning.calibrate import KINDS, Calibration, calibrate, like, mean_of_processes
from gradcomp_jax.planning.communication import measured
from gradcomp_jax.planning.predict import CLEAR, Prediction
from gradcomp_jax.planning.prices import BASELINES, Price, comparable, highest
from gradcomp_jax.planning.workload import Device, Workload
from gradcomp_jax.transforms.switched import names_of
from gradcomp_jax.transforms.worker_shards import ShardState

_LOG = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.5
"""Seconds before a measured collective. TCP starts slowly again after such a silence; a longer one changes nothing."""

_TIMED = 2**24
"""Entries up to which the user's own tensors are timed, and not a matrix: there must be room for four workers."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Says what was chosen, and why; as text it is one sentence.

    Attributes:
        name: name of the candidate.
        predictions: a step with each candidate, in their order, equal in all processes.
        workers: the number of workers that exchange.
        axis_name: the axis along which they exchange.
    """

    name: str
    predictions: tuple[Prediction, ...]
    workers: int
    axis_name: str

    def __str__(self) -> str:
        """Returns the reason."""
        each = "; ".join(
            f"{p.method} {p.step:.3g} s ({p.compute:.3g} computing, {p.compress:.3g} compressing"
            f"{f' ({p.figures})' if p.figures else ''}, {p.exposed:.3g} waiting for {p.sent:,.0f} bytes"
            f"{f', {p.price} the steps of dense' if p.price else ''})"
            for p in self.predictions
        )
        return (
            f"{self.name} for {self.workers} workers along {self.axis_name!r}, the first whose step is predicted within"
            f" {CLEAR - 1:.0%} of the fastest: {each}"
        )


@_arguments.checked
def choose(
    candidates: Mapping[str, optax.GradientTransformation],
    params: PyTree,
    mesh: Mesh,
    *,
    compute: float,
    axis_name: str = "data",
    overlap: float = 0.0,
    calibration: Calibration | None = None,
    compress: Mapping[str, float] | None = None,
    task: str | None = None,
    optimizer: str | None = None,
) -> Choice:
    """Measures the link, predicts a step with each candidate, and chooses the first that is not clearly slower than another.

    This is for runs whose link is not known before they start. Every process of ``mesh`` calls it with the same candidates,
    before the first step. All choose the same: their measurements are averaged over the processes first. Process 0 logs the
    reason, at level INFO of the logger ``gradcomp_jax.planning.choose``.

    The order of the candidates counts: a later candidate is chosen only if the step of each earlier one is more than
    :data:`gradcomp_jax.planning.predict.CLEAR` times as long as the fastest step. So name the dense candidate first and those
    that change training most last; ties go to dense. A prediction is that of :func:`gradcomp_jax.predict`: bytes and launches
    are from the candidate's own description, seconds of its collectives from the calibration. Collectives along other axes of
    the mesh are not counted: they belong to ``compute``.

    With ``task`` or ``optimizer``, the seconds of a step are multiplied by the package's price of the candidate's method with
    default options, as in :func:`gradcomp_jax.should_compress`. A candidate without such a price is not chosen, unless no
    candidate has one. Without both arguments, only the seconds of a step count.

    Example:
        >>> candidates = {"dense": gc.dense(axis_name="data"), "powersgd": gc.powersgd(axis_name="data", rank=4)}
        >>> link = gc.calibrate(mesh, axis_name="data", kinds=("all-reduce",), sizes=(1024, 8192), repeats=1, methods=())
        >>> choice = gc.choose(candidates, params, mesh, compute=0.18, calibration=link)
        >>> tx = optax.chain(candidates[choice.name], optax.sgd(0.1))  # or gc.switched(candidates), then gc.set_choice
        >>> choice.name in candidates
        True

    Args:
        candidates: names and transformations, as for :func:`gradcomp_jax.switched`.
        params: the parameters, arrays or shapes; whole.
        mesh: the mesh of all devices.
        compute: seconds of a worker's step without the exchange; ``gc.profile_step(step, args).compute`` times one.
        axis_name: the axis along which the candidates exchange, over the link to measure.
        overlap: fraction of ``compute`` during which an exchange may run, see :class:`gradcomp_jax.Workload`; 0 in
            :func:`gradcomp_jax.switched`.
        calibration: a calibration of this axis instead of the measurement: :func:`gradcomp_jax.calibrate`, or a saved one.
        compress: seconds of one worker's arithmetic, by candidate. By default what the calibration has timed for methods of
            that name with their defaults, or else the figures of this platform. Within
            :func:`gradcomp_jax.hierarchical` and :func:`gradcomp_jax.model_parallel` this default is divided by the number of
            devices along the mesh's other axes.
        task: kind of model: ``conv``, ``transformer`` or ``lstm``; with ``optimizer`` alone it is found from names and shapes.
        optimizer: the optimizer that follows the exchange, of :data:`gradcomp_jax.planning.task.OPTIMIZERS`.

    Returns:
        The :class:`Choice`. With one worker it is the first candidate, and nothing is measured.

    Raises:
        ValueError: for no candidates, an axis that the mesh does not have, a calibration of another number of workers or
            without a needed collective, a candidate that is not a registered method and not in ``compress``, and an
            unknown task or optimizer.
    """
    names = names_of(candidates)
    _checks.one_of("axis_name", axis_name, mesh.axis_names)
    workers = mesh.shape[axis_name]
    workload = Workload.of(params, compute, overlap=overlap)
    found = {name: traffic_of(tx, params, mesh.shape, between=axis_name) for name, tx in candidates.items()}
    prices = _prices(candidates, params, mesh, axis_name, workload.task, task, optimizer)
    outer = arithmetic = [0.0] * len(names)
    figures = [""] * len(names)
    if workers > 1:
        given = compress or {}
        asked = [name for name in names if name not in given]
        methods = {name: _methods_of(name, candidates[name], params, mesh, axis_name) for name in asked}
        needed = {like(c.kind) for traffic in found.values() for c in traffic.collectives}
        if calibration is None:
            calibration = calibrate(
                mesh,
                axis_name=axis_name,
                kinds=[kind for kind in KINDS if kind in needed],
                pause=min(compute, _LONGEST_PAUSE_S),
                methods=dict.fromkeys(m for each in methods.values() for m, _ in each),
                params=params if workload.values <= _TIMED else None,
            )
        calibration.refuse_other_workers(workers)
        device = calibration.device or Device()
        outer = [measured(calibration, traffic.collectives) for traffic in found.values()]
        arithmetic = [
            given[name]
            if name in given
            else sum(
                device.compression(m, round(workload.values / parts), workload.tensors) for m, parts in methods[name]
            )
            for name in names
        ]
        figures = [
            "given"
            if name in given
            else f"{device.known.name}, {' and '.join({device.basis(m): 0 for m, _ in methods[name]})}"
            for name in names
        ]
    computed, *rest = mean_of_processes(mesh, [compute, *outer, *arithmetic])
    predictions = tuple(
        Prediction(
            name,
            "flat",
            compute=computed,
            compress=rest[len(names) + number],
            inner=0.0,
            outer=rest[number],
            exposed=max(0.0, rest[number] - overlap * computed),
            sent=found[name].sent,
            state=found[name].state,
            price=prices.get(name),
            figures=figures[number],
        )
        for number, name in enumerate(names)
    )
    known = [p for p in predictions if p.method in prices] or predictions
    fastest = min(p.progress for p in known)
    choice = Choice(next(p.method for p in known if p.progress <= CLEAR * fastest), predictions, workers, axis_name)
    if jax.process_index() == 0:
        _LOG.info("%s", choice)
    return choice


def _prices(
    candidates: Mapping[str, optax.GradientTransformation],
    params: PyTree,
    mesh: Mesh,
    axis_name: str,
    seen: str | None,
    task: str | None,
    optimizer: str | None,
) -> dict[str, Price | None]:
    """Returns prices of candidates whose runs came as far as dense; all candidates if neither task nor optimizer is given."""
    if task is None and optimizer is None:
        return dict.fromkeys(candidates)
    all_known = comparable(task or seen, optimizer, mesh.shape[axis_name])
    known = {method: price for method, price in all_known.items() if price.reached}
    found: dict[str, Price | None] = {}
    for name, tx in candidates.items():
        try:
            methods = {m for m, _ in _methods_of(name, tx, params, mesh, axis_name)} - set(BASELINES)
        except ValueError:  # The candidate is not a registered method.
            continue
        if methods <= set(known):
            found[name] = highest([known[m] for m in methods]) if methods else None
    return found


def _methods_of(
    name: str, tx: optax.GradientTransformation, params: PyTree, mesh: Mesh, axis_name: str
) -> list[tuple[str, int]]:
    """Returns the registered methods of a candidate's exchanges; for each exchange the one with the most options that match.

    Beside each name is the number of parts into which the gradient is divided for it.
    """
    _, state = jax.make_jaxpr(tx.init, axis_env=list(mesh.shape.items()), return_shape=True)(params)
    result = []
    others = math.prod(size for axis, size in mesh.shape.items() if axis != axis_name)

    def exchanges(tree: PyTree) -> list[ExchangeState]:
        return nodes_within(tree, lambda node: isinstance(node, ExchangeState))

    of_parts = {
        id(one) for shard in nodes_within(state, lambda node: isinstance(node, ShardState)) for one in exchanges(shard)
    }
    for exchange in exchanges(state):
        maker = exchange.made_by
        options = {m: made_by("", method.options).options for m, method in METHODS.items()}
        fitting = [
            m
            for m, method in METHODS.items()
            if method.make.__name__ == maker.name and set(options[m]) <= set(maker.options)
        ]
        if not fitting:
            raise ValueError(
                f"the candidate {name!r} is made by {maker.name or 'something'}, which is no registered method, and nothing is"
                f" known of its arithmetic: give compress={{{name!r}: seconds}}"
            )
        parts = others if id(exchange) in of_parts else 1
        result.append((max(fitting, key=lambda m: len(options[m])), parts))
    return result
