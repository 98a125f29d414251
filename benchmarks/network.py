"""Real processes behind links of a chosen rate and delay: what a step takes with each method.

    python benchmarks/network.py --quick
    python benchmarks/network.py --train --resume --json docs/results/network.json --markdown docs/network.md \\
        --plots docs/results

Every worker is a process in a network namespace of its own, and the links between them are emulated; that needs root on
Linux. Without it, the workers run on this machine's loopback, and nothing is shaped or counted.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lab
from benchmarks.sweep import links, plot, report
from benchmarks.sweep.measure import MOST
from benchmarks.sweep.methods import METHODS
from benchmarks.sweep.run import Sweep, load, pending
from benchmarks.sweep.tasks import TASKS

QUICK = {
    "rates": ["unshaped", "100Mbit"],
    "delays": ["0ms"],
    "workers": [2],
    "models": ["conv"],
    "methods": ["dense", "dense-bf16", "block-quantized-int4", "dgc"],
    "rounds": 2,
    "seconds": 10.0,
}
FULL = {
    "rates": list(links.RATES),
    "delays": list(links.DELAYS),
    "workers": [2, 4],
    "models": ["conv", "lstm"],
    "methods": list(METHODS),
    "rounds": 2,
    "seconds": 60.0,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a trial of two cells on the conv net")
    add("--rates", nargs="+", metavar="RATE", help="unshaped, 1Gbit, 100Mbit, ...")
    add("--delays", nargs="+", metavar="DELAY", help="one way: 0ms, 25ms, ...")
    add("--workers", nargs="+", type=int, metavar="N")
    add("--models", nargs="+", choices=list(TASKS))
    add("--methods", nargs="+", choices=list(METHODS))
    add("--rounds", type=int, help="timed steps of each method in a cell, at least")
    add("--seconds", type=float, help=f"for which a cell's rounds go on, up to {MOST} of them")
    add("--train", action="store_true", help="also count the steps to a target loss, with the most workers")
    add("--json", type=Path, help="where the results are kept, cell by cell")
    add("--resume", action="store_true", help="measure only the cells that the JSON file has not")
    add("--markdown", type=Path, help=f"a document with the lines {report.START} and {report.END}")
    add("--plots", type=Path, help="the folder for network-MODEL.png")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        options.rates = [links.parse_rate(rate) for rate in options.rates]
        options.delays = [links.parse_delay(delay) for delay in options.delays]
    except ValueError as error:
        parser.error(str(error))
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if min(options.workers) < 2 or not 2 <= options.rounds <= MOST:
        parser.error(f"--workers is 2 or more, and --rounds is 2 to {MOST}")
    return options


def main() -> None:
    options = arguments()
    missing = lab.available()
    if missing is not None:
        print(f"Links cannot be shaped here, and runs are on the loopback of this machine: {missing}\n")
        options.rates, options.delays = [None], [0.0]
    results = load(options.json if options.resume else None)
    cells = list(links.cells(options.models, options.workers, options.rates, options.delays))
    if options.resume:
        cells = pending(cells, results, options.methods)
    train = []
    if options.train:
        most = max(options.workers)
        train = [(m, most) for m in options.models if not (options.resume and m in results["training"])]
    shaped = missing is None
    sweep = Sweep(results, options.json, options.methods, rounds=options.rounds, seconds=options.seconds, shaped=shaped)
    sweep.run(cells, train)
    print("\n" + "\n".join(report.check_lines(results["cells"])) + "\n")
    for cell in results["cells"]:
        print(f"{cell['key']}: {report.verdict(cell)}")
    if options.plots is not None:
        for model in options.models:
            plot.plot(results["cells"], model, options.plots / f"network-{model}.png")
    if options.markdown is not None:
        words = [os.path.relpath(sys.argv[0]), *sys.argv[1:]]
        text = report.markdown(results, "python " + " ".join(f"'{w}'" if " " in w else w for w in words))
        options.markdown.write_text(report.insert(options.markdown.read_text(), text))


if __name__ == "__main__":
    main()
