"""Goodput: examples a second over slow, late links, by strategy, and over time when a worker pauses or is gone.

    python benchmarks/goodput.py --quick
    python benchmarks/goodput.py --json docs/results/goodput.json --resume --write docs/world.md

The second takes about twelve minutes on two cores, and writes the section of the page. Every worker is a process in a network
namespace of its own, as in benchmarks/across_the_world.py; the links are emulated. That needs root on Linux; without it the
workers run on this machine's loopback, unshaped. Each strategy has new processes, which take it from the link that holds the
most to the one that holds the least, and to the unshaped one last: the shares of a row are of the same minutes.
"""

import argparse
import contextlib
import functools
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lab
from benchmarks.pages import write_between
from benchmarks.sweep import links
from benchmarks.sweep.tasks import TASKS
from benchmarks.world import faults, goodput
from benchmarks.world.strategies import GOODPUT
from benchmarks.world.workers import Workers

LINKS = ("unshaped:0ms", "500Mbit:90ms", "110Mbit:90ms", "20Mbit:90ms")
FAULT_LINK = "110Mbit:90ms"
FAULTY = ("dense bfloat16", "streaming DiLoCo int4, H = 100")
FULL = {
    "model": "conv",
    "workers": 4,
    "links": LINKS,
    "strategies": tuple(GOODPUT),
    "faulty": FAULTY,
    "seconds": 4.0,
    "run": 14.0,
    "pause": 4.0,
}
QUICK = {
    "model": "tiny",
    "workers": 2,
    "links": ("unshaped:0ms", "20Mbit:90ms"),
    "strategies": ("dense bfloat16", "streaming DiLoCo int4, H = 100"),
    "faulty": ("dense bfloat16",),
    "seconds": 1.0,
    "run": 3.0,
    "pause": 1.0,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a trial of three strategies over two links, on a tiny model: no result")
    add("--model", choices=tuple(TASKS))
    add("--workers", type=int, metavar="N", help="processes of the first table; 4")
    add("--links", nargs="+", metavar="RATE:DELAY", help="unshaped:0ms, 20Mbit:90ms, ...; one way")
    add("--strategies", nargs="+", choices=tuple(GOODPUT))
    add("--rounds", type=int, default=2, help="timed stretches of each strategy over each link")
    add("--seconds", type=float, help="about how long a stretch is; a whole period at least")
    add("--fault-workers", type=int, default=2, metavar="N", help="processes of the runs with faults: a core each; 2")
    add("--faulty", nargs="*", choices=tuple(GOODPUT), help="strategies of the runs with faults")
    add("--run", type=float, help="about how long a run is to which nothing happens, seconds")
    add("--pause", type=float, help="of one worker, seconds")
    add("--json", type=Path, help="where the results are kept, cell by cell")
    add("--resume", action="store_true", help="measure only what the JSON file has not")
    add("--write", type=Path, metavar="PAGE", help="a Markdown page with the marker goodput")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if min(options.workers, options.fault_workers) < 2:
        parser.error("--workers and --fault-workers are 2 or more")
    try:
        options.links = [_parsed(link) for link in options.links]
    except ValueError as error:
        parser.error(str(error))
    return options


def _parsed(link: str) -> goodput.Link:
    rate, _, delay = link.partition(":")
    return links.parse_rate(rate), links.parse_delay(delay)


def main() -> None:
    options = arguments()
    missing = lab.available()
    if missing is not None:
        print(f"Links cannot be shaped here, and runs are on the loopback of this machine: {missing}\n")
        options.links = [goodput.FREE]
    results: dict[str, Any] = {"cells": [], "faults": []}
    if options.resume and options.json.exists():
        results = json.loads(options.json.read_text())
        if any((results[k] != getattr(options, k)) for k in ("model", "workers")):
            raise SystemExit(
                f"{options.json} is of {results['workers']} workers and {results['model']}: give another file"
            )
    for name in options.strategies:
        if chosen := goodput.pending(results, name, goodput.in_order(options.links)):
            _cells(name, chosen, results, options)
    for name in faults.pending(results, options.faulty):
        _faults(name, results, options)
    text = "\n".join(_report(results))
    print(f"\n{text}")
    if options.write is not None:
        write_between(options.write, "goodput", f"`{_command()}`\n\n{text}")


def _cells(name: str, chosen: Sequence[goodput.Link], results: dict[str, Any], options: argparse.Namespace) -> None:
    """Measures a strategy over some links, by processes of its own."""
    with _places(options.workers) as net, Workers(options.model, options.workers, net) as team:
        results |= {k: team.facts[k] for k in ("machine", "versions", "source", "values", "batch")}
        results |= {"model": options.model, "workers": options.workers}
        run = goodput.Run(team, name)
        for rate, delay_s in chosen:
            if net is not None:
                net.shape(rate, delay_s)
            found = [float(f"{s:.5g}") for s in run.measure(options.rounds, options.seconds)]
            results["cells"].append({"strategy": name, "rate": rate, "delay_s": delay_s, "steps_s": found})
            _keep(results, options)
            print(f"{name}; {_where(rate, delay_s)}: {min(found):.4f} .. {max(found):.4f} s a step", flush=True)
        team.order("settle")


def _faults(name: str, results: dict[str, Any], options: argparse.Namespace) -> None:
    """Measures what faults do to a strategy."""
    rate, delay_s = _parsed(FAULT_LINK)
    with _places(options.fault_workers) as net:
        if net is None:
            rate, delay_s = goodput.FREE
        start = functools.partial(Workers, options.model, options.fault_workers, net)
        shape = functools.partial(net.shape, rate, delay_s) if net is not None else lambda: None
        found = faults.measure(start, shape, name, faults.Plan(options.run, options.pause))
    results["faults"] = [f for f in results["faults"] if f["strategy"] != name]
    where = {"strategy": name, "rate": rate, "delay_s": delay_s, "workers": options.fault_workers}
    for fault, seen in found.items():
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in seen.items()}
        results["faults"].append({**where, "fault": fault, **rounded})
        print(f"{name}; {fault}: {seen['seconds']:.1f} s", flush=True)
    _keep(results, options)


def _places(workers: int) -> contextlib.AbstractContextManager[lab.Network | None]:
    return lab.Network(workers) if lab.available() is None else contextlib.nullcontext()


def _keep(results: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _where(rate: float | None, delay_s: float) -> str:
    return f"{links.rate_name(rate)}, {links.delay_name(delay_s)}"


def _command() -> str:
    return shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def _report(results: dict[str, Any]) -> list[str]:
    machine = ", ".join(f"{k} {v}" for k, v in results["machine"].items() if k != "processes")
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    model = f"{results['model']}, {results['values']:,} parameters, {results['source']}, {results['batch']} examples a worker"
    lines = [f"{machine}; {versions}.", "", f"{model}; {results['workers']} workers.", ""]
    lines += [*goodput.table(results), "", goodput.aim(results), ""]
    if results["faults"]:
        first = results["faults"][0]
        lines += [f"With faults: {first['workers']} workers at {_where(first['rate'], first['delay_s'])}.", ""]
    return lines + faults.tables(results)


if __name__ == "__main__":
    main()
