"""A plan as a table and a sentence."""

import math

from gradcomp_jax.cli import units
from gradcomp_jax.cli.tables import Columns
from gradcomp_jax.methods.registry import METHODS, command_name
from gradcomp_jax.planning import Calibration, speed_up
from gradcomp_jax.planning.outlook import Outlook
from gradcomp_jax.planning.predict import CLEAR, FORMULAS_OFF, Prediction, doubt
from gradcomp_jax.planning.prices import BASELINES

_TIMES = ("step", "compute", "compress", "inner", "outer", "exposed")
_DROPPED_FIRST = (
    "figures",
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
_ROWS = 5
_LARGE_STATE = 1e9
"""Bytes that are worth a word."""


def title(found: Outlook, what: str) -> str:
    """Returns one line that says what was asked."""
    cluster, workload = found.cluster, found.workload
    nodes = f", {cluster.per_node} to a node" if cluster.per_node > 1 else ""
    return (
        f"{what}: {workload.values:,} values, {units.show_seconds(workload.compute)} a step;"
        f" {cluster.workers} workers{nodes}, {link(found)}; {_said(found)};"
        f" arithmetic by {_figures(found)}"
    )


def _figures(found: Outlook) -> str:
    """Returns whose figures the arithmetic is of, and how they were found: ``v5e's figures, compiled``."""
    device = found.device
    how = " and ".join(dict.fromkeys(device.basis(p.method) for p in found.verdict.ranking))
    whose = "the calibration's" if device.copies else f"{device.known.name}'s"
    scaled = "" if device.copies or device.copy_rate is None else f" at {units.show_bytes(device.copy_rate)}/s"
    return f"{whose} figures{scaled}, {how}"


def _said(found: Outlook) -> str:
    """Returns what is said of the task, and how to say it."""
    task = found.task or "task not known (--task)"
    return f"{task}, {found.optimizer or 'any optimizer (--optimizer)'}"


def link(found: Outlook) -> str:
    """Returns what joins the nodes, for instance ``10 Gbit/s, 50 us``."""
    if found.break_even is None:
        return "a calibrated link"
    outer = found.cluster.outer
    return f"{units.show_rate(outer.rate)}, {units.show_seconds(outer.latency)}"


def _cells(found: Outlook, p: Prediction) -> dict[str, str]:
    """Returns what can be said of a method, by column."""
    hierarchical = " *" if p.layout == "hierarchical" else ""
    price = "" if p.method in BASELINES else str(p.price or "no price")
    return {
        "method": f"{command_name(p.method)}{hierarchical}{' !' if METHODS[p.method].caution else ''}",
        **{part: units.show_seconds(getattr(p, part)) for part in _TIMES},
        "figures": p.figures,
        "x dense": f"{found.dense.step / p.step:.2f}x" if p.step else "-",
        "efficiency": f"{100 * speed_up(p, found.cluster.workers) / found.cluster.workers:.0f}%",
        "steps": price,
        "to a loss": _to_a_loss(found, p),
        "sent": units.show_bytes(p.sent),
        # Counters are a few bytes in all.
        "state": units.show_bytes(p.state) if p.state > 1024 else "0",
        "loses above": _even(found, p),
        "price": price,
        "price of": p.price.source if p.price and p.method not in BASELINES else "",
    }


def table(found: Outlook) -> Columns:
    """Returns the table for a terminal, in the order of the ranking; prices only where there is one."""
    without = {"steps", "to a loss"} | ({"loses above"} if found.break_even is None else set())
    if not any(p.price for p in found.verdict.ranking):
        without |= {"price", "price of"}
    cells = [_cells(found, p) for p in found.verdict.ranking]
    return Columns([{name: row[name] for name in row if name not in without} for row in cells], _DROPPED_FIRST)


def short(found: Outlook) -> Columns:
    """Returns the first five rows, the better dense one among them, with what decides."""
    first = list(found.verdict.ranking[:_ROWS])
    if found.dense not in first:
        first[-1] = found.dense
    names = ["method", "step", "x dense", *(("steps", "to a loss") if found.verdict.weighed else ()), "sent", "state"]
    cells = [_cells(found, p) for p in first]
    return Columns([{name: row[name] for name in names} for row in cells], ("state", "sent", "to a loss", "steps"))


def _to_a_loss(found: Outlook, p: Prediction) -> str:
    """Returns how many times as fast as dense it comes as far; at most so where its runs did not come so far."""
    if not p.progress or doubt(p) > 1:
        return "-"
    return f"{'< ' if doubt(p) else ''}{found.dense.progress / p.progress:.2f}x"


def short_notes(found: Outlook, calibration: Calibration | None, *, prices_off: bool = False) -> list[str]:
    """Returns what a reader of the first rows has to know; :func:`notes` has all."""
    shown = {row["method"] for row in short(found).rows}
    lines = []
    if any("*" in name for name in shown):
        lines.append("*: dense within a node, the method between nodes (gc.hierarchical).")
    if any("!" in name for name in shown):
        lines.append("!: does not train as dense does with everything as it was; --all says how.")
    reasons: dict[str, int] = {}
    for why in found.verdict.skipped.values():
        kind = "their state does not fit into a device" if "does not fit" in why else "they cannot be predicted"
        reasons[kind] = reasons.get(kind, 0) + 1
    lines += [f"left out: {count} methods, because {kind} (--all)." for kind, count in reasons.items()]
    if found.verdict.weighed:
        lines.append("steps: of dense's, for what dense reaches. to a loss: times as fast as dense, steps counted.")
    elif prices_off:
        lines.append("prices are off: seconds of a step alone count.")
    off = "measured collectives" if calibration else f"off by {100 * FORMULAS_OFF:.0f}% (median) without --calibration"
    lines.append(f"modelled, {off}. --all: {len(found.verdict.ranking)} methods, all columns and notes.")
    return lines


def sentences(found: Outlook) -> list[str]:
    """Returns the verdict, then what overlap makes of it, what is only faster a step, and what takes much memory."""
    why = f" ({found.device.why}; --platform says another)" if found.device.why and not found.device.copies else ""
    verdict = f"{_verdict(found)} Arithmetic by {_figures(found)}{why}."
    return [verdict, *_chain(found), _overlap(found), *_trains_worse(found), *_memory(found)]


def _chain(found: Outlook) -> list[str]:
    """Says how to write what is recommended before Adam, whose first moment depends on it."""
    method = METHODS[found.best.method]
    if not found.verdict.compress or found.optimizer not in ("adam", "adamw") or method.update != "mean":
        return []
    first = " without a first moment, because the method has one," if method.adam_b1 == 0 else ""
    return [f"Write it as gc.adamw(learning_rate, {method.call}): Adam{first} as it was measured."]


def _verdict(found: Outlook) -> str:
    verdict, first, dense = found.verdict, found.best, found.dense
    best, plain = command_name(first.method), command_name(dense.method)
    same = _to_the_same_loss(found, first)
    if verdict.compress:
        own = f"{best} takes {_takes(first)}, {verdict.gain:.2f}x as fast as {plain}{same}"
        caution = METHODS[first.method].caution
        mind = f" Mind how {best} trains: {caution}." if caution and not _chain(found) else ""
        return f"Compress: {own}{_above(found, first)}.{mind}"
    there = f"{plain} takes {units.show_seconds(dense.step)} a step"
    if first not in verdict.known:
        return f"Do not compress: {there}, and no run of {_asked(found)} shows that one of these comes as far as dense."
    gain = dense.progress / first.progress
    below = _below(found)
    if verdict.tie:
        margin = f"{gain:.2f}x as fast{same}, less of a difference than a plan can tell (worth it from {CLEAR:g}x)"
        return f"Do not compress: {there}, and {best} is {margin}: a tie{'' if gain > 1 else below}."
    what = "the best method" if first.price else "the fastest method"
    return f"Do not compress: {there}, {what} {_takes(first)} ({best}){below}."


def _to_the_same_loss(found: Outlook, p: Prediction) -> str:
    """Returns nothing without a price; a price of another kind of model says nothing of the loss of this one."""
    if p.price is None:
        return ""
    return " to the same loss" if p.price.kind in ("", found.task) else f", by the steps of {p.price.task}"


def _asked(found: Outlook) -> str:
    """Returns what there is no run of, for instance ``a transformer with adamw and so many workers``."""
    model = f"a {found.task}" if found.task else "any task"
    return f"{model} with {found.optimizer + ' and ' if found.optimizer else ''}so many workers"


def _overlap(found: Outlook) -> str:
    other = found.overlapped
    if other is None:
        return f"Overlap: that is with {found.workload.overlap:g} of the step beside the exchange."
    dense = command_name(next(p.method for p in other.ranking if p.method in BASELINES))
    if other.compress:
        said = f"compress, {command_name(other.method)} is {other.gain:.2f}x as fast as {dense}"
    else:
        said = "a tie" if other.tie else "do not compress"
    return f"Overlap: that is with 0, the exchange after the backward pass. With 2/3, beside it: {said}."


def _memory(found: Outlook) -> list[str]:
    """Returns a remark on a state that takes a tenth of a device, or a gigabyte where the device is not known."""
    worse, memory = found.verdict.trains_worse, found.device_memory
    remarks = []
    for p in [*([found.best] if found.verdict.compress else []), *([worse] if worse else [])]:
        if p.state >= (_LARGE_STATE if memory is None else 0.1 * memory):
            part = "--device-memory says whether it fits"
            if memory is not None:
                part = f"{p.state / memory:.0%} of a device's {units.show_bytes(memory)}"
            remarks.append(f"State: {command_name(p.method)} keeps {units.show_bytes(p.state)} on each worker: {part}.")
    return remarks


def _above(found: Outlook, method: Prediction) -> str:
    rate = (found.break_even or {}).get(method.method)
    if rate is None:
        return ""
    return ", at any rate" if math.isinf(rate) else f"; above {units.show_rate(rate)} dense is faster"


def _below(found: Outlook) -> str:
    known = {p.method for p in found.verdict.known}
    rates = {name: rate for name, rate in (found.break_even or {}).items() if name in known}
    if not rates:
        return ""
    closest, rate = max(rates.items(), key=lambda item: item[1])
    return (
        f"; below {units.show_rate(rate)} {command_name(closest)} is faster"
        if rate
        else "; no method is faster at any rate"
    )


def _trains_worse(found: Outlook) -> list[str]:
    worse = found.verdict.trains_worse
    if worse is None:
        return []
    own = f"Faster: {command_name(worse.method)} is {found.dense.step / worse.step:.2f}x as fast a step"
    why = f"there is no price for it: no run of {_asked(found)} shows how it trains"
    if worse.price is not None:
        why = f"it trains worse: it takes {_takes(worse)}"
    return [f"{own}, and not recommended, because {why}."]


def _takes(p: Prediction) -> str:
    """Returns the seconds of a step, and how many there must be where that is known."""
    step = f"{units.show_seconds(p.step)} a step"
    if p.price is None:
        return step
    more = "" if p.price.reached else "more than "
    return f"{step} and {more}{p.price.steps:.2f}x the steps ({p.price.source})"


def notes(found: Outlook, calibration: Calibration | None, matrices: bool, *, prices_off: bool = False) -> list[str]:
    """Returns what a reader has to know of the figures."""
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
    device = found.device
    lines.append(f"compress: {_figures(found)}; {device.known.name}: {device.known.source.rstrip('.')}.")
    timed = [p.method for p in found.verdict.ranking if device.basis(p.method) == "timed here"]
    if timed:
        lines.append(f"compress of {', '.join(map(command_name, timed))}: timed on this machine just now.")
    reasons: dict[str, list[str]] = {}
    for name, why in found.verdict.skipped.items():
        reasons.setdefault(why, []).append(command_name(name))
    lines += [f"left out: {', '.join(names)}: {why}" for why, names in reasons.items()]
    faster = [p.method for p in found.verdict.ranking if p.step < found.dense.step]
    minded = [f"{command_name(name)}: {METHODS[name].caution}" for name in faster if METHODS[name].caution]
    priced = {p.method for p in found.verdict.ranking if p.price}
    if found.verdict.weighed:
        pages = sorted({p.price.page for p in found.verdict.ranking if p.price and p.price.page})
        of = f" ({', '.join(pages)})" if pages else ""
        lines.append(
            f"price: steps for what dense reaches, over dense's{of}; the order is that of step times price, then lower bounds"
            " (>), then methods without a price by step: neither is recommended."
        )
        lines.append(f"prices of the package: {_said(found)}, runs of at least half as many workers as exchange.")
    else:
        why = "prices are off" if prices_off else "no run shows how many steps these methods need"
        lines.append(f"{why}: seconds of a step alone count.")
    if minded:
        if any(name not in priced for name in faster if METHODS[name].caution):
            mark = "no price" if priced else "!"
            lines.append(f"{mark}: ranked by speed alone, which says nothing of how they train.")
        lines += [f"! {one}." for one in minded]
    if found.cluster.per_node > 1:
        lines.append("*: dense within a node, the method between nodes (gc.hierarchical); the others in one exchange.")
    if matrices:
        lines.append("parameters taken as matrices of 1024 x 1024: PowerSGD's bytes depend on it (--model, --from).")
    above = "" if found.break_even is None else " loses above: the rate from which the better dense one is faster."
    lines.append(f"sent: bytes that leave a node in a step.{above}")
    return lines


def _even(found: Outlook, p: Prediction) -> str:
    rate = (found.break_even or {}).get(p.method)
    if rate is None or (found.verdict.weighed and doubt(p) > 1):
        return ""
    if rate == 0:
        return "always"
    return "never" if math.isinf(rate) else units.show_rate(rate)
