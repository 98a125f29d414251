"""Trains methods to the end on real tasks, for as many hours as there are, and writes tables of what they gave.

    python benchmarks/accuracy.py too-few-steps --hours 2 --at-once 2
    python benchmarks/accuracy.py cifar10 --hours 1 --at-once 2 --one-device    # on a machine with a GPU
    python benchmarks/accuracy.py too-few-steps --write docs/results/too-few-steps.md

Workers are simulated on this machine: what a method does to training, and the bytes that it sends, are as on any other, its
seconds are not. Each run is a process that is saved after every epoch; the same command goes on where it was broken off, and
a run that has a result is not run again. Data sets come by ``benchmarks/data.py``.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.training import report, run
from benchmarks.training.cells import STUDIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES, help="what is trained")
    parser.add_argument("--hours", type=float, default=0.0, help="time for runs (default: none, only the tables)")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the cores (default: %(default)s)")
    parser.add_argument(
        "--one-device",
        action="store_true",
        help="the workers of a run share the first device that JAX finds, such as a GPU, instead of CPU devices;"
        " on a CPU some tasks are faster so too, others slower",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="PART",
        help="train runs with such a part in their names, those with the first part first; * stands for anything",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/results/runs"), help="folder of the results"
    )
    parser.add_argument(
        "--checkpoints",
        type=pathlib.Path,
        default=pathlib.Path("benchmark-results/training"),
        help="folder of runs that are not complete (default: %(default)s)",
    )
    parser.add_argument(
        "--write", type=pathlib.Path, metavar="PAGE", help="also write the page, and its picture beside it"
    )
    options = parser.parse_args()
    if options.at_once < 1:
        parser.error(f"--at-once must be at least 1, got {options.at_once}")
    study = STUDIES[options.study]
    # Studies of one task share the runs that they have in common.
    folder, checkpoints = options.out / study.task, options.checkpoints / study.task
    if options.hours:
        run.run_all(
            study,
            folder,
            checkpoints,
            hours=options.hours,
            only=options.only,
            at_once=options.at_once,
            one_device=options.one_device,
        )
    found = run.results(folder)
    print(report.table(study, found))
    if options.write:
        report.write(options.study, study, found, options.write)


if __name__ == "__main__":
    main()
