"""Composes seconds to a loss from runs of benchmarks/accuracy.py and modelled seconds of a step over slow and fast links.

    python benchmarks/time_to_accuracy.py docs/results/runs/enwik8 --measure
    python benchmarks/time_to_accuracy.py docs/results/runs/enwik8 --step 5ms --copy-rate 1TB/s
    python benchmarks/time_to_accuracy.py docs/results/runs/enwik8 --measure --write docs/results/time-to-accuracy.md

Nothing is trained. --measure times one worker's step and a copy on this machine, which should do nothing else; the task's data
must be there (benchmarks/data.py).
"""

import argparse
import collections
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import tasks
from benchmarks.sweep.links import parse_rate
from benchmarks.training import curves, seconds, time_page, time_to_loss
from gradcomp_jax.cli import units
from gradcomp_jax.experiments.machine import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", type=pathlib.Path, help="a folder of runs of one task, or a file of gradcomp compare --out")
    add("--workers", type=int, help="of the runs (default: the number that most methods have)")
    add("--epochs", type=int, help="of rows that were run longer than the task (default: the task's own)")
    add("--measure", action="store_true", help="time one worker's step and a copy on this machine")
    add("--step", metavar="TIME", help="in its place: a worker's step without an exchange, such as 5ms")
    add(
        "--copy-rate",
        metavar="RATE",
        default="1TB/s",
        help="with --step: bytes a second of a copy (default: %(default)s)",
    )
    add("--latency", metavar="TIME", default="0.1ms", help="of the links, one way (default: %(default)s)")
    add("--rates", nargs="+", default=["10Gbit", "1Gbit", "100Mbit", "20Mbit"], metavar="RATE")
    add(
        "--tolerance",
        type=float,
        default=time_to_loss.TOLERANCE,
        help="by how much the target may be worse than what dense ends at (default: %(default)s)",
    )
    add("--write", type=pathlib.Path, metavar="PAGE", help="also write the page, and its pictures beside it")
    options = parser.parse_args()
    tasks.add()
    if options.measure == bool(options.step):
        parser.error("say what computation takes, with one of --measure and --step")
    found = curves.read(options.runs)
    if not found:
        parser.error(f"there are no runs in {options.runs}: python benchmarks/accuracy.py makes them")
    workers = options.workers or collections.Counter(one.workers for one in found).most_common(1)[0][0]
    if options.measure:
        worker = seconds.measure(found[0].task, workers)
        measured = f"Both measured on one worker here: {', '.join(f'{k} {v}' for k, v in machine().items())}."
    else:
        worker = seconds.Worker(units.seconds("--step", options.step), units.rate("--copy-rate", options.copy_rate))
        measured = "Both given."
    rates = [rate for text in options.rates if (rate := parse_rate(text))]
    latency = units.seconds("--latency", options.latency)
    more = {
        "workers": workers,
        "epochs": options.epochs,
        "rates": rates,
        "latency": latency,
        "tolerance": options.tolerance,
    }
    try:
        composed = time_to_loss.compose(found, worker, **more)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(time_to_loss.table(composed)))
    print()
    print("\n".join(time_to_loss.steps_table(composed)))
    if options.write:
        command = "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
        time_page.write(composed, options.write, command, measured)


if __name__ == "__main__":
    main()
