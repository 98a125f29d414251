"""What a step would take with its exchange beside its computation: modelled, from the cells that were measured in sequence.

Every schedule here changes nothing in the result but the last one. All are as good as they could be: cutting a program costs
nothing, tensors are encoded in no time before they leave, and the link is never idle while something waits for it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import gradcomp_jax as gc
from gradcomp_jax import _markdown

from .tasks import TASKS

Row = Mapping[str, Any]
LIMIT = 1.3
"""What the claim about the bound allows."""
FORWARD = 1 / 3
"""The forward pass's part of the computation: a layer has one matrix product there, and two in the backward pass."""


class Parts(NamedTuple):
    """What one step is made of, all of it in seconds and one after the other.

    Attributes:
        computation: gradient and optimizer: the least of all methods' steps alone, each of which has it.
        handling: what the method adds where links are not the limit: compression, the owners' encoding, sockets.
        wire: bytes / rate.
        beyond: what the slow links add over that; below 0 where the step over fast ones was timed when the machine was busier.
        bound: the larger of computation with compression and ``wire``.
        first: the part of the values that lies in the tensor which the forward pass uses first. Its gradient is done last.
    """

    computation: float
    handling: float
    wire: float
    beyond: float
    bound: float
    first: float


def parts(cell: Row, unshaped: Row, method: str, first: float, *, least: bool = False) -> Parts:
    """Reads a method's step in a cell, the median or the least, and in the one of the same team over links without limits."""
    row = cell["methods"][method]
    step_s = row["range_s"][0] if least else row["step_s"]
    computation = min(m["alone_s"] for m in cell["methods"].values())
    busy = min(step_s, max(computation, unshaped["methods"][method]["step_s"]))
    wire = 8 * row["sent"] / cell["rate"]
    return Parts(computation, busy - computation, wire, step_s - busy - wire, row["bound_s"], first)


def sequence(p: Parts) -> float:
    """One after the other, as it was measured."""
    return p.computation + p.handling + p.wire + p.beyond


def halves(p: Parts) -> float:
    """Two halves of the batch; what the first one gives is exchanged beside the second one's computation. Twice the bytes."""
    half, network = p.computation / 2, p.wire + p.beyond
    return half + p.handling + max(half, network) + p.handling + network


def backward(p: Parts) -> float:
    """Each tensor leaves when the backward pass is done with it: none within the forward pass, the last one at the end."""
    return max(FORWARD * p.computation + p.wire + p.beyond, anywhere(p))


def anywhere(p: Parts) -> float:
    """Beside the next step's forward pass as well.

    The tensor that is used first has its gradient last: neither pass goes on while it is handled and crosses. So a step takes
    the computation and all of this one tensor's exchange, whatever is done meanwhile for the others.
    """
    alone = p.computation + p.first * (p.handling + p.wire + p.beyond)
    return max(p.computation + p.handling, p.wire + p.beyond, alone)


def perfect(p: Parts) -> float:
    """The same over links that lose nothing: bytes take bytes / rate."""
    return anywhere(p._replace(beyond=min(0.0, p.beyond)))


def late(p: Parts) -> float:
    """The exchange, with what handles it, beside the next gradient: another method, ``gc.make_overlapped_step(delay=1)``.

    One exchange follows the other, and nothing of it is beside another one. Computation and handling share the cores.
    """
    return p.handling + max(p.computation, p.wire + p.beyond)


SCHEDULES = {
    "in sequence, measured": sequence,
    "two halves": halves,
    "backward pass": backward,
    "and forward pass": anywhere,
    "over perfect links": perfect,
    "a step late": late,
}


@functools.cache
def first_share(model: str) -> float:
    """The part of a task's values that lies in the tensor which its loss uses first."""
    task = TASKS[model]
    batch = task.read()[1](0, 0, 2)
    params = jax.eval_shape(task.init, batch)
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    return sizes[gc.forward_order(task.loss, params, batch)[0]] / sum(sizes.values())


class Missed(NamedTuple):
    """A step that takes longer than the claim about the bound allows, and its parts, of the least of its steps as well."""

    model: str
    method: str
    parts: Parts
    least: Parts


def missed(cells: Sequence[Row], workers: int = 4, rate: float = 1e8) -> Iterator[Missed]:
    """Every such step over links without a delay."""
    by_link = {(c["model"], c["rate"]): c for c in cells if c["workers"] == workers and c["delay_s"] == 0}
    for (model, at), cell in by_link.items():
        unshaped = by_link.get((model, None))
        if at != rate or unshaped is None:
            continue
        for method, row in cell["methods"].items():
            if row["step_s"] > LIMIT * row["bound_s"] and method in unshaped["methods"]:
                both = [parts(cell, unshaped, method, first_share(model), least=least) for least in (False, True)]
                yield Missed(TASKS[model].summary.split(",")[0], method, *both)


def tables(cells: Sequence[Row]) -> list[str]:
    """Two tables: the parts of each step that misses the bound, and what the schedules would make of it; times the bound."""
    found = list(missed(cells))
    heads = ("model", "method", "the bound", "computation", "handling", "bytes / rate", "links beyond", "first tensor")
    rows = [(m.model, m.method, f"{m.parts.bound:.3g} s", *_shares(m.parts), f"{m.parts.first:.0%}") for m in found]
    lines = [*_markdown.table(heads, rows, align="llr"), ""]
    made = [(m.model, m.method, *(_times(schedule, m) for schedule in SCHEDULES.values())) for m in found]
    return lines + _markdown.table(("model", "method", *SCHEDULES), made, align="llr")


def _shares(p: Parts) -> list[str]:
    return [f"{s / p.bound:.2f}" for s in (p.computation, p.handling, p.wire, p.beyond)]


def _times(schedule: Callable[[Parts], float], of: Missed) -> str:
    """In bold what misses the bound; in brackets by the least of the timed steps."""
    ratio, least = (schedule(p) / p.bound for p in (of.parts, of.least))
    text = f"{ratio:.2f}x ({least:.2f}x)"
    return f"**{text}**" if ratio > LIMIT else text
