"""How a model scales: modelled to a thousand workers, beside what was measured with two to eight processes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gradcomp_jax as gc
from benchmarks.planning.validate import compute_times, shapes_of, traffic_of
from benchmarks.sweep.links import delay_name, rate_name
from benchmarks.sweep.methods import METHODS
from gradcomp_jax import _markdown
from gradcomp_jax.planning import Device, Link, Workload, predict

SIZES = tuple(2**k for k in range(1, 11))
LATENCY = 50e-6
"""Of a link, where none is emulated."""

WHOLE = 64
"""Strong scaling divides the batch of as many workers."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Speed-ups over one worker, by method and number of workers.

    Attributes:
        model: of the sweep over links.
        rate: of the links, bits a second.
        delay_s: of the links.
        compute: seconds of a worker's step without an exchange.
        weak: modelled; each worker's batch stays.
        strong: modelled; the batch of all together stays.
        measured: like ``weak``, of the sweep.
        computing: likewise, seconds of a step without an exchange on so many workers at once.
    """

    model: str
    rate: float
    delay_s: float
    compute: float
    weak: Mapping[str, Mapping[int, float]]
    strong: Mapping[str, Mapping[int, float]]
    measured: Mapping[str, Mapping[int, float]]
    computing: Mapping[int, float]


def scaling(
    cells: Sequence[Mapping[str, Any]], model: str, *, rate: float, delay_s: float, sizes: Sequence[int] = SIZES
) -> Scaling:
    """Models all methods of the sweep by the planner's formulas, with the computation and the arithmetic that it measured.

    A step between N workers of strong scaling computes for the N-th part of what one does with the whole batch; smaller parts
    that are less efficient are not in it.

    Raises:
        ValueError: if the sweep has no cell of the model over this link.
    """
    own = [c for c in cells if c["model"] == model]
    there = {c["workers"]: c for c in own if c["rate"] == rate and c["delay_s"] == delay_s}
    if not there:
        links = sorted({f"{rate_name(c['rate'])} and {delay_name(c['delay_s'])}" for c in own})
        raise ValueError(f"there is no cell of {model} over such a link; there are {'; '.join(links) or 'none of it'}")
    fewest = min(c["workers"] for c in own)
    # Processes that have a core each.
    alone = [c for c in own if c["workers"] == fewest]
    compute = compute_times(own)[model, fewest]
    least = {name: min(c["methods"][name]["alone_s"] for c in alone) for name in METHODS}
    extra = {name: max(0.0, least[name] - least["dense"]) for name in METHODS}
    link = Link.of_bits(rate, delay_s + LATENCY)

    def step(name: str, workers: int, seconds: float) -> float:
        workload = Workload(seconds, shapes_of(model))
        method, described = METHODS[name].name, traffic_of(model, workers, name)
        # Seconds, as copies at one copy a second.
        device = Device(8 * workload.values, {method: extra[name]})
        cluster = gc.Cluster(workers, link)
        return predict(workload, cluster, method, device=device, traffic=lambda *_: described, prices={}).step

    whole = WHOLE * compute
    return Scaling(
        model,
        rate,
        delay_s,
        compute,
        {name: {n: n * compute / step(name, n, compute) for n in sizes} for name in METHODS},
        {name: {n: whole / step(name, n, whole / n) for n in sizes} for name in METHODS},
        {
            name: {
                n: n * c["nothing_s"] / c["methods"][name]["step_s"] for n, c in there.items() if name in c["methods"]
            }
            for name in METHODS
        },
        {n: c["nothing_s"] for n, c in sorted(there.items())},
    )


def table(curves: Mapping[str, Mapping[int, float]], measured: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Returns a row for each method; where a number of workers was measured as well, that stands in brackets."""
    sizes = sorted({n for line in curves.values() for n in line})
    rows = []
    for name, line in curves.items():
        beside = measured.get(name, {})
        rows.append((name, *(_number(line[n]) + (f" ({_number(beside[n])})" if n in beside else "") for n in sizes)))
    return _markdown.table(("method", *map(str, sizes)), rows, align="lr")


def _number(x: float) -> str:
    """Returns three digits that count, without an exponent."""
    return f"{float(f'{x:.3g}'):,g}"


def best(curves: Mapping[str, Mapping[int, float]]) -> dict[str, int]:
    """Returns the number of workers from which more of them are no faster, by method; those that always are have none."""
    found = {}
    for name, line in curves.items():
        top = max(line, key=lambda n: line[n])
        if top != max(line) and math.isfinite(line[top]):
            found[name] = top
    return found
