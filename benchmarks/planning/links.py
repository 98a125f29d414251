"""Calibrates every link of the sweep."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import lab
from benchmarks.sweep.links import delay_name, in_order, rate_name
from benchmarks.sweep.team import Team

KINDS = ("all-reduce", "all-gather", "all-to-all")
LONGEST = 4.0  # seconds of one collective, and of a size's repeats
REPEATS = 5


def measure(path: Path, rates: Sequence[float | None], delays: Sequence[float], workers: Sequence[int]) -> None:
    """Adds to the file a calibration of each link and number of workers that it does not have."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"links": []}
    for n in workers:
        done = {(c["rate"], c["delay_s"]) for c in results["links"] if c["workers"] == n}
        wanted = [link for link in in_order(rates, delays) if link not in done]
        if not wanted:
            continue
        with lab.Network(n) as net, Team("tiny", n, net) as team:
            results |= {"machine": team.facts["machine"], "versions": team.facts["versions"]}
            for rate, delay in wanted:
                net.shape(rate, delay)
                start = time.monotonic()
                found = team.order("calibrate", {"kinds": KINDS, "longest": LONGEST, "repeats": REPEATS})[0]
                results["links"].append({"workers": n, "rate": rate, "delay_s": delay, "calibration": found})
                path.write_text(json.dumps(results, indent=1) + "\n")
                lines = ", ".join(
                    f"{kind} {1e3 * fit['alpha_s']:.1f} ms + {1e9 * fit['beta_s_per_byte']:.1f} s/GB"
                    for kind, fit in found["fits"].items()
                )
                took = time.monotonic() - start
                print(f"{n} workers, {rate_name(rate)}, {delay_name(delay)}: {took:.0f} s; {lines}", flush=True)
