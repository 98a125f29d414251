"""Training across the world: what is left of the throughput where links are slow and late, by strategy.

    python benchmarks/across_the_world.py --quick
    python benchmarks/across_the_world.py --resume --json docs/results/world.json --markdown docs/world.md

Every worker is a process in a network namespace of its own, as in benchmarks/network.py; the links are emulated. That needs
root on Linux; without it the workers run on this machine's loopback, unshaped.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lab
from benchmarks.sweep import links
from benchmarks.sweep.report import insert
from benchmarks.world import report
from benchmarks.world.strategies import EVERY, HIDING, STRATEGIES
from benchmarks.world.workers import Workers

LINKS = ("unshaped:0ms", "100Mbit:25ms", "20Mbit:90ms", "13Mbit:180ms")


def measure(team: Workers, name: str, rounds: int, seconds: float) -> list[float]:
    """Seconds of a step, in parts of whole periods of one stretch; a part before them fills what is in flight."""
    strategy = EVERY[name]
    period = strategy.period
    team.order("begin", name)
    # The first steps compile, and find nothing in flight.
    first = max(2 * period, 4)
    team.stretch(0, first, 1)
    once = statistics.median(team.stretch(first, period, 3)) / period
    count = period * max(1, round(seconds / (once * period)))
    found = team.stretch(first + 3 * period, count, rounds + 1)[1:]
    team.order("settle")
    return [taken / count for taken in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a trial of three strategies over two links")
    add("--links", nargs="+", default=list(LINKS), metavar="RATE:DELAY", help="unshaped:0ms, 20Mbit:90ms, ...; one way")
    add("--workers", type=int, default=4, metavar="N")
    add("--model", default="conv", choices=("conv", "lstm"))
    add("--strategies", nargs="+", choices=[*STRATEGIES, *HIDING], default=list(STRATEGIES))
    add("--rounds", type=int, default=3, help="timed stretches of each strategy over each link")
    add("--seconds", type=float, default=6.0, help="about how long a stretch is")
    add("--json", type=Path, help="where the results are kept")
    add("--resume", action="store_true", help="measure only what the JSON file has not")
    add("--markdown", type=Path, help=f"a document with the lines {report.START} and {report.END}")
    options = parser.parse_args()
    if options.quick:
        options.links, options.rounds = ["unshaped:0ms", "20Mbit:90ms"], 2
        options.strategies = ["synchronous dense", "delayed int8, t = p = 8", "delayed dgc, t = p = 8"]
    chosen = [(links.parse_rate(r), links.parse_delay(d)) for r, d in (link.split(":") for link in options.links)]
    missing = lab.available()
    if missing is not None:
        print(f"Links cannot be shaped here, and runs are on the loopback of this machine: {missing}\n")
        chosen = [(None, 0.0)]
    results: dict[str, Any] = {"cells": []}
    if options.resume and options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    done = {(c["strategy"], c["rate"], c["delay_s"]) for c in results["cells"]}
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(lab.Network(options.workers)) if missing is None else None
        team = stack.enter_context(Workers(options.model, options.workers, net))
        results |= {k: team.facts[k] for k in ("machine", "versions", "source", "values")}
        results |= {"model": options.model, "workers": options.workers}
        for name in options.strategies:
            for rate, delay_s in chosen:
                if (name, rate, delay_s) in done:
                    continue
                if net is not None:
                    net.shape(rate, delay_s)
                found = measure(team, name, options.rounds, options.seconds)
                cell = {
                    "strategy": name,
                    "rate": rate,
                    "delay_s": delay_s,
                    "steps_s": [float(f"{s:.5g}") for s in found],
                }
                results["cells"].append(cell)
                if options.json is not None:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")
                where = f"{links.rate_name(rate)}, {links.delay_name(delay_s)}"
                print(f"{name}; {where}: {statistics.median(found):.3f} s a step", flush=True)
    print("\n" + report.table(results))
    if options.markdown is not None:
        words = [os.path.relpath(sys.argv[0]), *sys.argv[1:]]
        text = report.markdown(results, "python " + " ".join(words))
        options.markdown.write_text(insert(options.markdown.read_text(), text, report.START, report.END))


if __name__ == "__main__":
    main()
