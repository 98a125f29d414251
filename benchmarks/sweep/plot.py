"""Speed-up over dense float32 against the rate of the links, one panel for each delay."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .links import delay_name, rate_name

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_STYLES = {
    "dense": ("black", "s", "--"),
    "dense-bf16": ("#6F6F6F", "s", "--"),
    "block-quantized": ("#56B4E9", "o", "-"),
    "block-quantized-int4": ("#0072B2", "o", "-"),
    "terngrad": ("#E69F00", "^", "-"),
    "ef-sign-sgd": ("#5B2A86", "d", "-"),
    "powersgd": ("#CC79A7", "h", "-"),
    "dgc": ("#009E73", "*", "-"),
}


def plot(cells: Sequence[Mapping[str, Any]], model: str, path: Path) -> bool:
    """Writes a PNG of one model; returns whether there was something to show."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own = [c for c in cells if c["model"] == model and "dense" in c["methods"]]
    if not own:
        return False
    workers = sorted({c["workers"] for c in own})
    delays = sorted({c["delay_s"] for c in own})
    rates = sorted({c["rate"] for c in own}, key=lambda rate: -(rate or float("inf")))
    figure, panels = plt.subplots(
        len(workers),
        len(delays),
        figsize=(1.5 + 4.5 * len(delays), 1.2 + 3.8 * len(workers)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row, n in zip(panels, workers, strict=True):
        for axes, delay_s in zip(row, delays, strict=True):
            here = {c["rate"]: c["methods"] for c in own if (c["workers"], c["delay_s"]) == (n, delay_s)}
            for name, (colour, marker, line) in _STYLES.items():
                points = [(i, here[r]) for i, r in enumerate(rates) if r in here and name in here[r]]
                axes.plot(
                    [i for i, _ in points],
                    [m["dense"]["step_s"] / m[name]["step_s"] for _, m in points],
                    color=colour,
                    marker=marker,
                    linestyle=line,
                    markersize=9 if marker == "*" else 6,
                    linewidth=1.4,
                    label=name,
                )
            axes.set_title(f"{n} workers, {delay_name(delay_s)} one way", fontsize=11, loc="left")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
            axes.set_yticks([0.5, 1, 2, 5, 10, 20])
            axes.set_xticks(range(len(rates)), [rate_name(r) for r in rates], fontsize=9)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    for row in panels:
        row[0].set_ylabel("speed-up over dense float32")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
