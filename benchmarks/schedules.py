"""What a step over slow links would take if its exchange ran beside its computation: modelled, from measured cells.

    python benchmarks/schedules.py
    python benchmarks/schedules.py --write docs/network.md

Nothing is run but the trace of each model's loss, for the order in which it uses its tensors.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import write_between
from benchmarks.sweep import schedules

MEASURED = Path(__file__).resolve().parents[1] / "docs" / "results" / "network.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=MEASURED, help="the cells of benchmarks/network.py")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page with the markers schedules-table")
    options = parser.parse_args()
    lines = schedules.tables(json.loads(options.json.read_text())["cells"])
    print("\n".join(lines))
    if options.write is not None:
        command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
        write_between(options.write, "schedules-table", "\n".join([f"`{command}`", "", *lines]))


if __name__ == "__main__":
    main()
