"""A plan as plain values, for JSON."""

import dataclasses
import math
from typing import Any

from gradcomp_jax.planning import Verdict, speed_up
from gradcomp_jax.planning.outlook import OVERLAPPED, Outlook


def to_dict(found: Outlook) -> dict[str, Any]:
    """Returns a plan for JSON; the break-even of a method that always or never pays is ``"always"`` or ``"never"``."""
    return {
        "workload": dataclasses.asdict(found.workload),
        "cluster": dataclasses.asdict(found.cluster),
        "task": found.task,
        "optimizer": found.optimizer,
        "device_memory": found.device_memory,
        "platform": {
            "name": found.device.known.name,
            "why": found.device.why,
            "source": found.device.known.source,
            "memory_rate": found.device.rate,
        },
        **_brief(found.verdict),
        "overlapped": None if found.overlapped is None else {"overlap": OVERLAPPED, **_brief(found.overlapped)},
        "skipped": dict(found.verdict.skipped),
        "predictions": [
            {
                **dataclasses.asdict(p),
                "step": p.step,
                "progress": p.progress,
                "efficiency": speed_up(p, found.cluster.workers) / found.cluster.workers,
                "break_even": _plain((found.break_even or {}).get(p.method)),
            }
            for p in found.verdict.ranking
        ],
        **(_curves(found) if found.has_curves else {}),
    }


def _curves(found: Outlook) -> dict[str, Any]:
    return {
        "speed_up_by_workers": {"workers": found.by_workers[0], **found.by_workers[1]},
        "speed_up_by_rate": {"bytes_per_second": found.by_rate[0], **found.by_rate[1]},
    }


def _brief(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in ("compress", "method", "gain", "tie")}


def _plain(rate: float | None) -> float | str | None:
    if rate is None:
        return None
    if rate == 0:
        return "never"
    return "always" if math.isinf(rate) else rate
