"""What the benchmark must show, each as a line with its numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .bounds import exchange_s

Row = Mapping[str, Any]
LARGE_MODEL = 10_000_000


class Check(NamedTuple):
    """Attributes: what must hold, whether it does (``None``: not measured), and the numbers."""

    claim: str
    holds: bool | None
    numbers: str


def checks(cells: Sequence[Row]) -> list[Check]:
    """Every claim against the cells that were measured."""
    slow = _where(cells, lambda c: c["workers"] == 4 and c["rate"] == 1e8 and c["delay_s"] == 0)
    fast = _where(cells, lambda c: c["rate"] == 1e9 and c["delay_s"] == 0)
    return [
        _shorter("dgc", 20, slow),
        _shorter("block-quantized-int4", 4, slow),
        _near_bound(slow),
        _beats_bf16(fast),
        _bytes_agree(cells),
    ]


def _where(cells: Sequence[Row], test: Callable[[Row], bool]) -> list[Row]:
    return [c for c in cells if c["values"] >= LARGE_MODEL and test(c)]


def _shorter(method: str, times: float, cells: Sequence[Row]) -> Check:
    claim = f"4 workers at 100 Mbit/s: what is not computation is {times:g}x shorter with {method} than with dense"
    found = [c for c in cells if {method, "dense"} <= set(c["methods"])]
    if not found:
        return Check(claim, None, "not measured")
    dense, own = exchange_s(found[0], "dense"), exchange_s(found[0], method)
    return Check(claim, dense >= times * own, f"{dense:.3f} s / {own:.3f} s = {dense / own:.1f}x")


def _near_bound(cells: Sequence[Row]) -> Check:
    claim = "4 workers at 100 Mbit/s: a step takes at most 1.3x max(computation + compression, bytes / rate)"
    found = {name: m["step_s"] / m["bound_s"] for c in cells for name, m in c["methods"].items()}
    text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in found.items())
    return Check(claim, all(r <= 1.3 for r in found.values()) if found else None, text or "not measured")


def _beats_bf16(cells: Sequence[Row]) -> Check:
    claim = "1 Gbit/s: the best method beats dense-bf16"
    lines, holds = [], []
    for c in cells:
        times = {name: m["step_s"] for name, m in c["methods"].items()}
        others = {name: t for name, t in times.items() if not name.startswith("dense")}
        if "dense-bf16" in times and others:
            best = min(others, key=others.__getitem__)
            holds.append(others[best] < times["dense-bf16"])
            lines.append(f"{c['workers']} workers: {best} {others[best]:.3f} s, dense-bf16 {times['dense-bf16']:.3f} s")
    return Check(claim, all(holds) if holds else None, "; ".join(lines) or "not measured")


def _bytes_agree(cells: Sequence[Row]) -> Check:
    claim = "bytes of the interfaces agree with the compiled program's, by the model of the overhead"
    found = [(c["key"], name, m) for c in cells for name, m in c["methods"].items() if m["agrees"] is not None]
    apart = [f"{key}, {name}: {m['counted']:,.0f} of {m['sent']:,}" for key, name, m in found if not m["agrees"]]
    text = "; ".join(apart[:8]) or f"all {len(found)}" if found else "not measured"
    return Check(claim, not apart if found else None, f"{len(found) - len(apart)} of {len(found)}; {text}")
