"""The library beside what peers publish: the same gradients, step by step, and how far the results are apart.

    python benchmarks/peers.py

A line for each comparison: whose algorithm, what of it, the largest difference of an entry in any step as a part of its
tensor's largest, and the bound: how far the peer's algorithm is from itself when its gradients are off by 2**-16. Peers
are written by us in NumPy (`benchmarks/published`). Then the departures and arrivals of Streaming DiLoCo's fragments,
and how many of DeMo's signs are not the authors'. Ends with 1 if a difference is above its bound.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.published import beside, comparisons, streaming
from gradcomp_jax import _markdown


def main() -> int:
    rows, apart = [], 0
    for comparison in comparisons.COMPARISONS:
        bound, difference = comparison.bound(), comparison.distance()
        apart += not difference <= bound <= beside.MOST
        steps, workers = comparison.steps, beside.WORKERS
        rows.append([comparison.peer, comparison.what, steps, workers, f"{difference:.1e}", f"{bound:.1e}"])
    header = ["peer", "replayed", "steps", "workers", "largest difference", "bound"]
    print(*_markdown.table(header, rows, align="llr"), sep="\n")
    print(f"\nStreaming DiLoCo, {streaming.EVERY} steps a period, a delay of {streaming.SHOWN}: when fragments")
    print("depart and arrive, by step\n")
    told = [[who, *map(in_words, both)] for who, both in streaming.turns().items()]
    print(*_markdown.table(["whose", "departures", "arrivals"], told, align="l"), sep="\n")
    share = [f"{comparisons.signs_apart(exact=exact):.1%}" for exact in (False, True)]
    wide = f"{comparisons.signs_apart(exact=True, shapes=comparisons.WIDE):.1%}"
    print(f"\nDeMo on smooth gradients: {share[0]} of the signs are not the authors'; with exact=True {share[1]}, and")
    print(f"{wide} of a tensor four tiles wide, whose tiles are not our chunks.")
    return int(apart > 0)


def in_words(turns: streaming.Turns) -> str:
    return ", ".join(f"{number} at {step}" for step, number in turns)


if __name__ == "__main__":
    sys.exit(main())
