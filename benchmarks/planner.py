"""Holds the planner's predictions against the measured cells of benchmarks/network.py, and the papers' claims against it.

    python benchmarks/planner.py --calibrate --markdown docs/planner.md

The links are those of benchmarks/network.py, emulated between real processes (root on Linux); --calibrate runs a few
collectives over each that planner.json has not, with pauses as long as the measured models compute. Without it nothing is
run.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lab
from benchmarks.planning import claims, links, report
from benchmarks.planning.validate import compute_times, held_out
from benchmarks.sweep.links import DELAYS, RATES, parse_delay, parse_rate
from benchmarks.sweep.report import insert

RESULTS = Path("docs/results")
START, END = "<!-- planner-tables -->", "<!-- /planner-tables -->"
CLAIMS_START, CLAIMS_END = "<!-- planner-claims -->", "<!-- /planner-claims -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--calibrate", action="store_true", help="measure collectives over every link that planner.json has not")
    add("--rates", nargs="+", default=list(RATES), metavar="RATE")
    add("--delays", nargs="+", default=list(DELAYS), metavar="DELAY", help="one way")
    add("--workers", nargs="+", type=int, default=[2, 4], metavar="N")
    add("--network", type=Path, default=RESULTS / "network.json", help="the measured cells (default: %(default)s)")
    add(
        "--json", type=Path, default=RESULTS / "planner.json", help="where calibrations are kept (default: %(default)s)"
    )
    add("--markdown", type=Path, help=f"a document with the lines {START}, {END}, {CLAIMS_START} and {CLAIMS_END}")
    options = parser.parse_args()
    if options.calibrate:
        missing = lab.available()
        if missing is not None:
            parser.error(f"links cannot be shaped here: {missing}")
        rates, delays = [parse_rate(r) for r in options.rates], [parse_delay(d) for d in options.delays]
        computing = compute_times(json.loads(options.network.read_text())["cells"])
        links.measure(options.json, rates, delays, {k: t for k, t in computing.items() if k[1] in options.workers})
    command = "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    found = "\n".join(claims.claims_table()) + "\n"
    print(found)
    texts = [(found, CLAIMS_START, CLAIMS_END)]
    if options.json.exists():
        texts.append((validation(options.json, options.network, command), START, END))
    else:
        print(f"Predictions are held against measured cells once there is {options.json}: run with --calibrate.")
    if options.markdown is not None:
        document = options.markdown.read_text()
        for text, start, end in texts:
            document = insert(document, text, start, end)
        options.markdown.write_text(document)


def validation(calibrations: Path, network: Path, command: str) -> str:
    """Prints the checks; returns the tables."""
    results, cells = json.loads(calibrations.read_text()), json.loads(network.read_text())["cells"]
    calibrated = held_out(cells, results["links"], formulas=False)
    by_formula = held_out(cells, results["links"], formulas=True)
    for title, held in (("calibrated", calibrated), ("formulas", by_formula)):
        for claim, holds, numbers in report.checks(held):
            print(f"{title}: {claim}: {'pass' if holds else 'FAIL'}, {numbers}")
    return report.markdown(results, calibrated, by_formula, command)


if __name__ == "__main__":
    main()
