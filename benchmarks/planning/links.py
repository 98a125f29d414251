"""Calibrates every link of the sweep, with the pauses of every model's steps."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lab
from benchmarks.sweep.links import delay_name, in_order, rate_name
from benchmarks.sweep.team import Team

KINDS = ("all-reduce", "all-gather", "all-to-all")
LONGEST = 4.0  # seconds of one collective, and of a size's repeats with their pauses
REPEATS = 5


def measure(
    path: Path, rates: Sequence[float | None], delays: Sequence[float], computing: Mapping[tuple[str, int], float]
) -> None:
    """Adds to the file a calibration of each link, model and number of workers that it does not have.

    Args:
        path: planner.json.
        rates: of links, bits a second.
        delays: likewise, seconds one way.
        computing: seconds for which a step of a model, on so many workers at once, sends nothing.
    """
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"links": []}
    done = {(c["model"], c["workers"], c["rate"], c["delay_s"]) for c in results["links"]}
    for n in sorted({n for _, n in computing}):
        models = [model for model, workers in computing if workers == n]
        links = in_order(rates, delays)
        wanted = [(m, rate, delay) for rate, delay in links for m in models if (m, n, rate, delay) not in done]
        if not wanted:
            continue
        with lab.Network(n) as net, Team("tiny", n, net) as team:
            results |= {"machine": team.facts["machine"], "versions": team.facts["versions"]}
            for model, rate, delay in wanted:
                net.shape(rate, delay)
                start = time.monotonic()
                pause = round(computing[model, n], 3)
                options = {"kinds": KINDS, "longest": LONGEST, "repeats": REPEATS, "pause": pause}
                found = team.order("calibrate", options)[0]
                link = {"model": model, "workers": n, "rate": rate, "delay_s": delay, "pause_s": pause}
                results["links"].append(link | {"calibration": found})
                path.write_text(json.dumps(results, indent=1) + "\n")
                lines = ", ".join(
                    f"{kind} {1e3 * fit['alpha_s']:.1f} ms + {1e9 * fit['beta_s_per_byte']:.1f} s/GB"
                    for kind, fit in found["fits"].items()
                )
                took = time.monotonic() - start
                where = f"{model}, {n} workers, {rate_name(rate)}, {delay_name(delay)}"
                print(f"{where}, pauses of {1e3 * pause:.0f} ms: {took:.0f} s; {lines}", flush=True)
