"""Trains small language models with what may go before AdamW, for as many hours as there are, and writes the tables.

    python benchmarks/before_adamw.py 65k-1 --hours 2
    python benchmarks/before_adamw.py 65k-1 --hours 2 --only 'top-k*' --steps 4000

All workers share one device and one thread: start as many of the same command as there are cores; no run is done twice. A run
that is broken off goes on where it was. Data come by ``benchmarks/data.py enwik8``.
"""

import argparse
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
)

from benchmarks import pages
from benchmarks.adamw import decision, goals, plot, rivals, runs, table, wire
from benchmarks.adamw.rivals import table as rivals_table
from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.task import MODELS, TASKS
from gradcomp_jax.methods import METHODS

METHOD_PAGES = decision.ROOT / "docs" / "methods"
DECISION_PAGES = (decision.ROOT / "README.md", METHOD_PAGES / "index.md")


def page_of(method: str) -> str:
    """Returns the name of a method's page, which other forms of it share; none for no method."""
    return METHODS[method].make.__name__ if method else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, help="the model, and the sequences of each worker in a step")
    parser.add_argument("--hours", type=float, default=0.0, help="time for runs (default: none, only the tables)")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="ROW", help="patterns of rows, the first ones first"
    )
    parser.add_argument("--steps", type=int, help="of the longest runs (default: of the task's longest)")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/results/adamw"), help="folder of the results"
    )
    parser.add_argument(
        "--checkpoints",
        type=pathlib.Path,
        default=pathlib.Path("benchmark-results/adamw"),
        help="folder of runs that are not complete (default: %(default)s)",
    )
    parser.add_argument(
        "--write",
        type=pathlib.Path,
        metavar="PAGE",
        help="also write the page's tables and its pictures, and the table of what to take",
    )
    parser.add_argument(
        "--rivals", action="store_true", help="published methods that are not in the package, and their table alone"
    )
    options = parser.parse_args()
    task = TASKS[options.task]
    folder, saved = options.out / options.task, options.checkpoints / options.task
    if options.rivals:
        ROWS.update(rivals.RIVALS)
    if options.hours:
        until = time.time() + 3600 * options.hours
        runs.run_all(task, folder, saved, until=until, only=options.only, steps=options.steps or task.lengths[0])
    everything = runs.Results.read(task, folder)
    found, of_rivals = (everything.of(rows) for rows in (ROWS.keys() - rivals.RIVALS, rivals.RIVALS))
    shown = [name for name, row in rivals.RIVALS.items() if options.rivals and of_rivals.tried(name, row)]
    tuned = [name for name, row in ROWS.items() if runs.best_rate(name, row, found) is not None]
    known = options.out / f"{options.task}-bytes.json"
    sizes, bfloat16 = wire.sizes(task, [*tuned, *shown], known), wire.bfloat16(task)
    fewer = {name: bfloat16["sent"] / size["sent"] for name, size in sizes.items()}
    if options.rivals:
        command = f"`python benchmarks/before_adamw.py {options.task} --rivals --write PAGE`"
        text = f"{rivals_table.table(of_rivals, found, fewer)}\n\n*{table.measured(of_rivals)} {command}*"
        print(text)
        if options.write:
            pages.write_between(options.write, f"{options.task}-rivals", text)
        return
    command = f"`python benchmarks/before_adamw.py {options.task} --write PAGE`"
    said = {
        options.task: f"{table.table(found, sizes, bfloat16)}\n\n*{table.measured(found)} {command}*",
        f"{options.task}-goals": goals.goals(found, fewer),
    }
    if task.tunes:
        said[f"{options.task}-tuning"] = table.tuning(found)
    print("\n\n".join(said.values()))
    if options.write:
        for name, text in said.items():
            pages.write_between(options.write, name, text)
        for page in DECISION_PAGES if options.task == "65k-1" else ():
            pages.write_between(page, "decision-table", decision.table(found, fewer, page))
        for page in METHOD_PAGES.glob("*.md") if options.task == "65k-1" else ():
            if "<!-- before-adamw -->" in page.read_text():
                own = {name: size for name, size in sizes.items() if page_of(ROWS[name].method) == page.stem}
                pages.write_between(
                    page, "before-adamw", table.table(found, own, bfloat16) if own else "None has run so far."
                )
        longest, model = task.lengths[0], MODELS[task.model]
        what = f"{model.summary}, on {model.length} characters of enwik8, 8 workers"
        best = [name for name in plot.frontier(found, fewer, longest) if name != table.BASELINE]
        if best and options.task == "65k-1":
            picture = options.write.with_suffix(".png")
            picture.write_bytes(plot.gap_by_bytes(found, fewer, (longest, task.tuned_at), what))
            picture.with_stem(f"{picture.stem}-steps").write_bytes(plot.gap_by_steps(found, best, what))


if __name__ == "__main__":
    main()
