"""What to take, by link and optimizer: the first table of the README, whose figures are those of the pages that it names."""

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Mapping

from benchmarks.adamw.runs import Results
from benchmarks.adamw.table import gaps
from benchmarks.adamw.task import TASKS
from gradcomp_jax import _markdown

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


@dataclasses.dataclass(frozen=True)
class Case:
    """A line of the table.

    Attributes:
      link: what is exposed of it.
      optimizer: that follows the exchange.
      take: code.
      row: the method's name in the page.
      page: in ``docs/results``; the protocol's has its runs beside it.
      steps: of the protocol's runs whose loss is shown.
    """

    link: str
    optimizer: str
    take: str
    row: str
    page: str = "protocol.md"
    steps: int = TASKS["65k-1"].lengths[0]


CASES = (
    Case("10 to 100 Gbit/s", "SGD", "gc.block_quantized(bits=8)", "block-quantized", "cifar10.md"),
    Case("10 to 100 Gbit/s", "AdamW", "gc.adamw(rate, gc.block_quantized(bits=4))", "int4", steps=4_000),
    Case(
        "below 10 Gbit/s",
        "SGD, momentum in the method",
        'gc.dgc(bits=2, pack_positions=True, block=4096, view="tree", warm_up=..., clip_norm=...)',
        "dgc-two-bits",
        "cifar10.md",
    ),
    Case(
        "below 10 Gbit/s",
        "AdamW, 4,000 to 10,000 steps",
        "gc.sparse_adamw(rate, density=0.02)",
        "sparse_adamw, 0.02",
        steps=4_000,
    ),
    Case("below 10 Gbit/s", "AdamW, more steps", "gc.sparse_adamw(rate)", "sparse_adamw, 0.01"),
    Case("below 1 Gbit/s", "AdamW, more steps", "gc.sparse_adamw(rate, density=0.005)", "sparse_adamw, 0.005"),
)
"""Those that have runs are shown."""


def table(found: Results, fewer: Mapping[str, float], page: pathlib.Path) -> str:
    """Returns the table as it stands in a page.

    Args:
        found: the protocol's runs.
        fewer: how many times fewer bytes than bfloat16 a row of the protocol sends.
        page: of the documentation, which it is written for.
    """
    home = page.resolve().parent
    dense = os.path.relpath(ROOT / "docs" / "when_not_to_compress.md", home)
    fast = "within a node or a slice, or hidden behind the backward pass"
    lines = [(fast, "any", '`gc.dense(dtype="bfloat16")`', "1x", f"[do not compress]({dense})")]
    for case in CASES:
        cost = _protocol(case, found, fewer) if case.page == "protocol.md" else _page(case)
        if cost is not None:
            ratio, gap = cost
            link = os.path.relpath(RESULTS / case.page, home)
            lines.append((case.link, case.optimizer, f"`{case.take}`", ratio, f"[{gap}]({link})"))
    header = ("exposed link", "optimizer", "take", "fewer bytes than bfloat16", "measured, against dense")
    return "\n".join(_markdown.table(header, lines, align="lllrl"))


def _protocol(case: Case, found: Results, fewer: Mapping[str, float]) -> tuple[str, str] | None:
    values = gaps(case.row, case.steps, found)
    if not values:
        return None
    gap = 100 * statistics.fmean(values)
    seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
    return (
        f"{_markdown.figure(fewer[case.row])}x",
        f"{gap:+.2f}% bits per character after {case.steps:,} steps, {seeds}",
    )


def _page(case: Case) -> tuple[str, str]:
    """Returns the same of a page of benchmarks/accuracy.py, whose row with eight workers it is."""
    lines = (RESULTS / case.page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header = next(row for row in rows if row[0] == "method")
    row = next(row for row in rows if row[:2] == [case.row, "8"])
    gap, seeds = (row[header.index(name)] for name in ("against dense", "seeds"))
    return row[header.index("fewer bytes")], f"{gap} of accuracy, {seeds} seeds"
