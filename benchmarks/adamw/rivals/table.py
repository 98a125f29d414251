"""What published methods gave, each beside the best row of the package that sends no more."""

from collections.abc import Mapping

from benchmarks.adamw.rivals import RIVALS
from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.runs import Results, best_of
from benchmarks.adamw.table import BASELINE, losses
from benchmarks.adamw.train import Run
from gradcomp_jax import _markdown

SEED = 0


def table(rivals: Results, found: Results, fewer: Mapping[str, float]) -> str:
    """Returns a row for each method that has runs, of the length that rates are chosen by and one seed.

    Args:
        rivals: runs of ``RIVALS``.
        found: runs of ``ROWS``.
        fewer: how many times fewer bytes than bfloat16 each row of both sends.
    """
    steps = found.task.tuned_at
    own = {name: losses(name, steps, found).get(SEED) for name in fewer if name in ROWS and name != BASELINE}
    dense = losses(BASELINE, steps, found)[SEED]
    gaps = {name: 100 * (loss / dense - 1) for name, loss in own.items() if loss is not None}
    lines = []
    for name, row in RIVALS.items():
        tried = rivals.tried(name, row)
        if not tried:
            continue
        rate = best_of(tried)
        gap = 100 * (float(rivals.runs[Run(name, rate, steps, SEED).name]["test"]) / dense - 1)
        best = min((n for n in gaps if fewer[n] >= fewer[name]), key=gaps.__getitem__)
        lines.append(
            (
                name,
                _times(fewer[name]),
                f"{rate:g} of {', '.join(f'{r:g}' for r in sorted(tried))}",
                f"{gap:+.2f}%",
                best,
                _times(fewer[best]),
                f"{gaps[best]:+.2f}%",
            )
        )
    header = ("method", "fewer bytes", "rate", f"{steps:,} steps", "best row that sends no more", "fewer bytes", "gap")
    return "\n".join(_markdown.table(header, lines, align="lrrrlrr"))


def _times(ratio: float) -> str:
    return f"{_markdown.figure(ratio)}x"
