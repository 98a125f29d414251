"""A plan as a table and a sentence."""

import math
from collections.abc import Container

from gradcomp_jax.cli import units
from gradcomp_jax.cli.tables import Columns
from gradcomp_jax.methods.registry import METHODS, command_name
from gradcomp_jax.planning import Calibration, speed_up
from gradcomp_jax.planning.outlook import Outlook
from gradcomp_jax.planning.predict import CLEAR, FORMULAS_OFF, Prediction
from gradcomp_jax.planning.prices import BASELINES
from gradcomp_jax.planning.workload import COPIES

_TIMES = ("step", "compute", "compress", "inner", "outer", "exposed")
_DROPPED_FIRST = (
    "compute",
    "state",
    "efficiency",
    "exposed",
    "sent",
    "inner",
    "price of",
    "compress",
    "loses above",
    "price",
)
"""Columns in the order in which a narrow terminal does without them."""


def title(found: Outlook, what: str) -> str:
    """One line that says what was asked."""
    cluster, workload = found.cluster, found.workload
    nodes = f", {cluster.per_node} to a node" if cluster.per_node > 1 else ""
    return (
        f"{what}: {workload.values:,} values, {units.show_seconds(workload.compute)} a step;"
        f" {cluster.workers} workers{nodes}, {link(found)}"
    )


def link(found: Outlook) -> str:
    """Returns what joins the nodes, for instance ``10 Gbit/s, 50 us``."""
    if found.break_even is None:
        return "a calibrated link"
    outer = found.cluster.outer
    return f"{units.show_rate(outer.rate)}, {units.show_seconds(outer.latency)}"


def rows(found: Outlook) -> list[dict[str, str]]:
    """Cells by column, in the order of the ranking; prices only where there is one."""
    dense = found.dense.step
    priced = any(p.price for p in found.verdict.ranking)
    return [
        {
            "method": command_name(p.method)
            + (" *" if p.layout == "hierarchical" else "")
            + (" !" if METHODS[p.method].caution else ""),
            **{part: units.show_seconds(getattr(p, part)) for part in _TIMES},
            "x dense": f"{dense / p.step:.2f}x",
            "efficiency": f"{100 * speed_up(p, found.cluster.workers) / found.cluster.workers:.0f}%",
            "sent": units.show_bytes(p.sent),
            # Counters are a few bytes in all.
            "state": units.show_bytes(p.state) if p.state > 1024 else "0",
            **({} if found.break_even is None else {"loses above": _even(found.break_even.get(p.method))}),
            **(_price(p) if priced else {}),
        }
        for p in found.verdict.ranking
    ]


def table(found: Outlook) -> Columns:
    """Returns the table for a terminal."""
    return Columns(rows(found), dropped_first=_DROPPED_FIRST)


def sentence(found: Outlook) -> str:
    """Returns the verdict as one sentence, and a second one on a method that is only faster a step."""
    return f"{_verdict(found)}{_trains_worse(found)}"


def _verdict(found: Outlook) -> str:
    verdict, fastest, dense = found.verdict, found.best, found.dense
    best, plain = command_name(fastest.method), command_name(dense.method)
    if verdict.compress:
        same, most = (" to the same loss", _at_most(fastest)) if _more_steps(fastest) else ("", "")
        own = f"{best} takes {_takes(fastest)}, {most}{verdict.gain:.2f}x as fast as {plain}{same}"
        caution = METHODS[fastest.method].caution
        mind = f" Mind how {best} trains: {caution}." if caution else ""
        if most:
            mind = f" Mind that its runs did not come as far as dense's.{mind}"
        if fastest.price is None and any(p.price for p in verdict.ranking):
            mind += f" No run shows how {best} trains, and no method with a price is worth it."
        return f"Compress: {own}{_above(found, fastest)}.{mind}"
    gain = dense.progress / fastest.progress
    there = f"{plain} takes {units.show_seconds(dense.step)} a step"
    below = _below(found)
    if verdict.tie:
        same = " to the same loss" if _more_steps(fastest) else ""
        margin = f"{gain:.2f}x as fast{same}, less of a difference than a plan can tell (worth it from {CLEAR:g}x)"
        return f"Do not compress: {there}, and {best} is {margin}: a tie{'' if gain > 1 else below}."
    if _more_steps(fastest):
        return f"Do not compress: {there}, the best method {_takes(fastest)} ({best}){below}."
    return f"Do not compress: {there}, the fastest method {units.show_seconds(fastest.step)} ({best}){below}."


def _above(found: Outlook, method: Prediction) -> str:
    rate = (found.break_even or {}).get(method.method)
    if rate is None:
        return ""
    return ", at any rate" if math.isinf(rate) else f"; above {units.show_rate(rate)} dense is faster"


def _below(found: Outlook) -> str:
    if not found.break_even:
        return ""
    closest, rate = max(found.break_even.items(), key=lambda item: item[1])
    return (
        f"; below {units.show_rate(rate)} {command_name(closest)} is faster"
        if rate
        else "; no method is faster at any rate"
    )


def _trains_worse(found: Outlook) -> str:
    worse = found.verdict.trains_worse
    if worse is None:
        return ""
    own = f"{command_name(worse.method)} is {found.dense.step / worse.step:.2f}x as fast a step"
    why = "no run shows how it trains" if worse.price is None else f"it trains worse: it takes {_takes(worse)}"
    return f" {own}, and not recommended, because {why}."


def _takes(p: Prediction) -> str:
    """Seconds of a step, and the steps where there must be more of them than dense needs."""
    step = f"{units.show_seconds(p.step)} a step"
    if p.price is None or not _more_steps(p):
        return step
    more = "" if p.price.reached else "more than "
    return f"{step} and {more}{p.price.steps:.2f}x the steps ({p.price.source})"


def _at_most(p: Prediction) -> str:
    return "" if p.price is None or p.price.reached else "at most "


def _more_steps(p: Prediction) -> bool:
    return p.price is not None and p.price.factor > 1


def _price(p: Prediction) -> dict[str, str]:
    if p.method in BASELINES:
        return {"price": "", "price of": ""}
    return {"price": str(p.price or "no curve"), "price of": p.price.source if p.price else ""}


def notes(found: Outlook, calibration: Calibration | None, *, matrices: bool, prices_off: bool = False) -> list[str]:
    """What a reader has to know of the figures.

    Args:
        found: what the figures are of.
        calibration: of the link, if there is one.
        matrices: whether parameters were a number, taken to be matrices.
        prices_off: whether seconds alone were asked for.
    """
    lines = [
        "modelled: collectives by latency and bandwidth, bytes as the methods' exchanges send them, defaults throughout."
    ]
    if calibration is None:
        lines.append(
            f"how far off: {100 * FORMULAS_OFF:.0f}%, the median over measured steps that were predicted without a calibration"
            " (docs/planner.md); with the link's own it is less: --calibration."
        )
        lines.append(
            "dense-bf16: in two phases or in one all-reduce (collective='all_reduce'; a CPU widens it to float32), whichever is"
            " faster."
        )
    else:
        worst = max(fit.errors[1] for fit in calibration.fits.values())
        lines.append(f"outer: measured collectives; the lines through them are off by {100 * worst:.0f}% at most.")
    if calibration is None or calibration.device is None:
        lines.append(
            "compress: copies of the gradient, as measured on a CPU, at --memory-rate; calibrate for your device."
        )
    timed = [p.method for p in found.verdict.ranking if p.method not in COPIES and p.method not in _own_copies(found)]
    if timed:
        lines.append(f"compress of {', '.join(map(command_name, timed))}: timed on this machine just now.")
    reasons: dict[str, list[str]] = {}
    for name, why in found.verdict.skipped.items():
        reasons.setdefault(why, []).append(command_name(name))
    lines += [f"left out: {', '.join(names)}: {why}" for why, names in reasons.items()]
    faster = [p.method for p in found.verdict.ranking if p.step < found.dense.step]
    minded = [f"{command_name(name)}: {METHODS[name].caution}" for name in faster if METHODS[name].caution]
    priced = {p.method for p in found.verdict.ranking if p.price}
    if priced:
        pages = sorted({p.price.page for p in found.verdict.ranking if p.price and p.price.page})
        of = f" ({', '.join(pages)})" if pages else ""
        lines.append(
            f"price: steps for what dense reaches, over dense's{of}; the order is that"
            " of step times price, then methods without a curve by step."
        )
    else:
        why = "prices are off" if prices_off else "no run shows how many steps these methods need"
        lines.append(f"{why}: seconds of a step alone count.")
    if minded:
        if any(name not in priced for name in faster if METHODS[name].caution):
            mark = "no curve" if priced else "!"
            lines.append(f"{mark}: ranked by speed alone, which says nothing of how they train.")
        lines += [f"! {one}." for one in minded]
    if found.cluster.per_node > 1:
        lines.append("*: dense within a node, the method between nodes (gc.hierarchical); the others in one exchange.")
    if matrices:
        lines.append("parameters taken as matrices of 1024 x 1024: PowerSGD's bytes depend on it (--model, --from).")
    above = "" if found.break_even is None else " loses above: the rate from which the better dense one is faster."
    lines.append(f"sent: bytes that leave a node in a step.{above}")
    return lines


def _own_copies(found: Outlook) -> Container[str]:
    return found.device.copies if found.device else ()


def _even(rate: float | None) -> str:
    if rate is None:
        return ""
    if rate == 0:
        return "always"
    return "never" if math.isinf(rate) else units.show_rate(rate)
