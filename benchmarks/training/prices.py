"""What a method costs in steps: the factor of dense's steps that it needs for what dense reaches."""

import inspect
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.training.cells import BASELINES
from benchmarks.training.curves import Curves, baseline, epochs_to, shown
from benchmarks.training.curves import read as read_curves
from gradcomp_jax import _markdown
from gradcomp_jax.methods.registry import METHODS, command_name
from gradcomp_jax.planning.prices import Price, highest

KIND = {
    **dict.fromkeys(("cifar10", "cifar10-conv", "mnist", "fashion-mnist", "digits"), "conv"),
    **dict.fromkeys(("enwik8", "enwik8-long"), "transformer"),
    "penn-treebank": "lstm",
}
"""Kinds of models that the tasks train."""
LEAST = 3
"""Evaluations of a run from which steps are read: with two, a price would be of one straight line."""


def price(curves: Curves, dense: Curves, *, page: str = "") -> Price:
    """Returns the steps that a method needs for what dense reaches in the second half of its run, over dense's.

    Both mean curves count by their best so far. Each value that dense has after an epoch of its second half is a target, and
    the price is the median of the targets' factors, of two the lower one. Where the method comes to fewer than half of them,
    its price is a lower bound: its whole run, over what dense takes to where the method ended. That the factor does not fall
    from there on is assumed.
    """
    factor, reached = _factor(curves.best(), dense.best())
    single = [_factor(curves.best(values), dense.best())[0] for values in curves.values.values()]
    spread = (figure(min(single)), figure(max(single))) if len(single) > 1 else None
    plain = dense.sent * (1 if dense.method == "dense" else 2)
    steps = curves.warm_up / (plain - (curves.sent - curves.warm_up)) if curves.warm_up else 0.0
    return Price(
        figure(factor),
        reached,
        spread,
        curves.task,
        KIND.get(curves.task, ""),
        curves.settings.get("optimizer", "sgd"),
        curves.workers,
        len(single),
        options_of(curves),
        page,
        figure(min(1.0, steps)),
    )


def _factor(own: Sequence[float], dense: Sequence[float]) -> tuple[float, bool]:
    targets = dense[len(dense) // 2 :]
    found = statistics.median_low(epochs_to(target, own) / epochs_to(target, dense) for target in targets)
    if math.isfinite(found):
        return found, True
    return len(own) / epochs_to(own[-1], dense), False


def figure(value: float) -> float:
    """Returns three digits of a number, as prices are kept."""
    return float(f"{value:.3g}")


def options_of(curves: Curves) -> str:
    """Returns what a method was given and does not have by default, as text; what is no method's is in the curves' name."""
    given = {name: value for name, value in curves.options.items() if name not in curves.shared}
    name = _registered().get(curves.method)
    if name is None:
        return ", ".join(shown(given))
    method, settings = METHODS[name], curves.settings
    takes = inspect.signature(method.make).parameters
    if "density" in takes:
        # Of the settings, whether or not the row named it.
        given.pop("density", None)
        if settings["density"] != method.options.get("density", takes["density"].default):
            given["density"] = settings["density"]
    if method.momentum == "inside" and method.update == "mean" and settings.get("optimizer") == "adamw":
        given["momentum"] = 0.0  # Adam's own is enough.
    return ", ".join(shown(given))


def _registered() -> dict[str, str]:
    return {command_name(name): name for name in METHODS}


def table(curves: Sequence[Curves]) -> list[str]:
    """Returns a row for each method and number of workers that there is a dense one of."""
    rows = []
    for one in sorted(curves, key=lambda c: -c.workers):
        dense = baseline(curves, one.workers, one.shared, of=one.method)
        if dense is None or one.epochs == 0:
            continue
        found = price(one, dense)
        rows.append((one.task, one.name, one.workers, str(found), _spread(found), found.seeds, options_of(one)))
    return _markdown.table(
        ("task", "method", "workers", "price", "of single seeds", "seeds", "options"), rows, align="llrrrrl"
    )


def package(tasks: Sequence[Sequence[Curves]], *, page: str) -> dict[str, list[Price]]:
    """Returns the prices of each registered method that there are runs of: by kind of model, optimizer and number of workers.

    Of several the one of its default options counts, and of several of these the highest: a plan must not promise what one of
    the tasks refutes.
    """
    found: dict[str, list[Price]] = {}
    for curves in tasks:
        for one in curves:
            name, dense = _registered().get(one.method), baseline(curves, one.workers, one.shared, of=one.method)
            # What one baseline is behind another does not come from what it sends.
            if name is not None and dense is not None and one.method not in BASELINES:
                found.setdefault(name, []).append(price(one, dense, page=page))
    return {name: _by_run(prices) for name, prices in sorted(found.items())}


def _by_run(prices: Sequence[Price]) -> list[Price]:
    of: dict[tuple[str, str, int], list[Price]] = {}
    for one in prices:
        of.setdefault(_run(one), []).append(one)
    return [highest([p for p in each if not p.options] or each) for _, each in sorted(of.items())]


def _run(price: Price) -> tuple[str, str, int]:
    return price.kind, price.optimizer, price.workers


def _spread(price: Price) -> str:
    return "-" if price.spread is None else f"{price.spread[0]:.2f} to {price.spread[1]:.2f}"


def merged(*each: Mapping[str, Sequence[Price]]) -> dict[str, list[Price]]:
    """Returns all prices by method; of one kind of model, optimizer and number of workers the last that has some counts."""
    found: dict[str, list[Price]] = {}
    for prices in each:
        for name, new in prices.items():
            given = {_run(price) for price in new}
            found[name] = [price for price in found.get(name, ()) if _run(price) not in given] + _by_run(new)
    return dict(sorted(found.items()))


def protocol_table(prices: Mapping[str, Sequence[Price]]) -> list[str]:
    """Returns a row for each price of the protocol."""
    rows = [
        (one.task, command_name(name), one.workers, str(one), _spread(one), one.seeds, one.options)
        for name, each in sorted(prices.items())
        for one in each
    ]
    header = ("runs", "method", "workers", "price", "of single seeds", "seeds", "options")
    return _markdown.table(header, rows, align="llrrrrl")


def as_json(prices: Mapping[str, Sequence[Price]]) -> dict[str, Any]:
    """Returns what JSON holds of prices, fields without a value left out."""
    blank = Price(1.0)
    fields = list(inspect.signature(Price).parameters)
    return {
        name: [{f: v for f in fields if (v := getattr(one, f)) != getattr(blank, f) or f == "steps"} for one in each]
        for name, each in prices.items()
    }


def tasks_in(runs: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of tasks in the folder of all runs."""
    return sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []


def read(paths: Sequence[pathlib.Path]) -> list[list[Curves]]:
    """Reads the curves of tasks, those left out that have too few points."""
    tasks = [[one for one in read_curves(path) if one.epochs >= LEAST] for path in paths]
    return [task for task in tasks if task]
