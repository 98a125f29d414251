"""Packs the results of runs into one file a task: a run has a file of its own until then.

    python benchmarks/packed.py docs/results/runs/* docs/results/adamw/*

Nothing is deleted before it is in the packed file.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from gradcomp_jax._files import write_whole

NAME = "runs.jsonl"


def read(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Reads what was run, by the names of the runs; a file of its own counts before what is packed."""
    packed = folder / NAME
    found = dict(map(json.loads, packed.read_text(encoding="utf-8").splitlines())) if packed.exists() else {}
    found |= {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    return dict(sorted(found.items()))


def pack(folder: pathlib.Path) -> int:
    """Puts the runs of a folder into its packed file, a line each, and returns how many there are in it."""
    single, found = list(folder.glob("*.json")), read(folder)
    if single:
        write_whole(folder / NAME, "".join(f"{json.dumps(one)}\n" for one in found.items()))
        for path in single:
            path.unlink()
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path, help="each of a task; what is no folder is left alone")
    for folder in parser.parse_args().folders:
        if folder.is_dir():
            print(f"{folder / NAME}: {pack(folder)} runs")


if __name__ == "__main__":
    main()
