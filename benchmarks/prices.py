"""Prints how many times dense's steps every method needs for what dense reaches.

The runs are those of benchmarks/accuracy.py and benchmarks/before_adamw.py.

    python benchmarks/prices.py
    python benchmarks/prices.py --write docs/results/prices.md
    python benchmarks/prices.py --runs out/compare-fashion-mnist.json

Nothing is trained. --write writes the page, and the prices that come with the package, which the planner weighs steps by.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.adamw import price, runs
from benchmarks.adamw.task import TASKS
from benchmarks.training import prices
from gradcomp_jax._files import write_whole
from gradcomp_jax.planning.prices import DATA

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs" / "results" / "runs"
PAGE = "docs/results/prices.md"
PROTOCOL = ROOT / "docs" / "results" / "adamw" / "65k-1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--runs",
        nargs="+",
        type=pathlib.Path,
        help="folders of runs, one a task, or files of gradcomp compare --out (default: all of docs/results/runs)",
    )
    add("--write", type=pathlib.Path, metavar="PAGE", help="write the page, and the prices of the package")
    options = parser.parse_args()
    tasks = prices.read(options.runs or prices.tasks_in(RUNS))
    lines = [line for task in tasks for line in [*prices.table(task), ""]]
    protocol = price.prices(runs.Results.read(TASKS[PROTOCOL.name], PROTOCOL), task="enwik8", page=PAGE)
    if not options.runs:
        lines = [*prices.protocol_table(protocol), "", *lines]
    print(
        "\n".join(lines)
        if lines
        else f"there are no runs of {prices.LEAST} evaluations: python benchmarks/accuracy.py makes them"
    )
    if options.write is None:
        return
    if options.runs:
        parser.error("--write takes the runs of docs/results/runs, which a test holds the package to: leave --runs out")
    if not lines:
        parser.error("there is nothing to write")
    options.write.write_text("\n".join(text(lines, options.write)), encoding="utf-8")
    kept = prices.as_json(prices.merged(prices.package(tasks, page=PAGE), protocol))
    write_whole(DATA, json.dumps(kept, indent=1) + "\n")


def text(lines: list[str], page: pathlib.Path) -> list[str]:
    """Returns the lines of the page."""
    return [
        "# Prices in steps",
        "",
        f"```\npython benchmarks/prices.py --write {page}\n```",
        "",
        "**Measured.** How many times the steps of the dense baseline a method needs for what the baseline reaches in"
        " the second half of its run. For each of the baseline's evaluations there: the steps at which the method's mean"
        " curve is as good, over the baseline's own (best so far, straight lines between epochs). The price is the"
        " median. `>`: the method came to fewer than half of them, and the price is a lower bound: its whole run, over"
        " what the baseline takes to where the method ended. Single seeds are held against the same mean curve; the"
        " baseline's own spread is what chance does. DGC clips gradients: where a task has `dense-bf16-clip`, DGC is held"
        " against it, and what does not clip against dense without. Tasks of two evaluations (MNIST) have no price.",
        "",
        "The first table is of [the protocol](protocol.md), whose runs are whole: the price is a run's steps over"
        " those of the dense run with the same loss. Before AdamW it counts in place of the runs of 1,200 steps in the table of"
        " enwik8, which [were too few](too-few-steps.md).",
        "",
        "[The planner](../planner.md#steps-to-a-loss) weighs steps by the highest price of a method on your kind of model, with"
        " your optimizer and a comparable number of workers; of its default options where there are runs of these.",
        "",
        *lines,
    ]


if __name__ == "__main__":
    main()
