"""Draws how training scales: speed-ups modelled to 1,024 workers beside measured ones, and accuracy by simulated workers.

    python benchmarks/scaling.py --write docs/results/scaling.md
    python benchmarks/scaling.py --model conv --rate 100Mbit --runs docs/results/runs/enwik8 --write docs/results/scaling.md

Nothing is run. The measured steps are those of benchmarks/network.py, the accuracies those of benchmarks/accuracy.py.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.planning import scaling
from benchmarks.planning.scaling import LATENCY, WHOLE, Scaling
from benchmarks.sweep.links import delay_name, parse_delay, parse_rate, rate_name
from benchmarks.training import curves
from benchmarks.training.curves import Curves
from gradcomp_jax import _markdown
from gradcomp_jax.cli.colours import COLOURS

RESULTS = pathlib.Path("docs/results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--network",
        type=pathlib.Path,
        nargs="+",
        default=[RESULTS / "network.json", RESULTS / "network-8.json"],
        metavar="FILE",
        help="measured cells (default: network.json and network-8.json of docs/results)",
    )
    add("--model", default="lstm", help="of the cells (default: %(default)s)")
    add("--rate", default="1Gbit", help="of the links (default: %(default)s)")
    add("--delay", default="0ms", help="of the links (default: %(default)s)")
    add("--runs", type=pathlib.Path, help="a folder of runs of one task with several numbers of workers")
    add("--write", type=pathlib.Path, metavar="PAGE", help="write the page, and its picture beside it")
    options = parser.parse_args()
    rate = parse_rate(options.rate)
    if rate is None:
        parser.error("--rate must be one that a model can be made of, such as 1Gbit")
    swept = {path.name: json.loads(path.read_text()) for path in options.network}
    cells = [cell for one in swept.values() for cell in one["cells"]]
    try:
        found = scaling.scaling(cells, options.model, rate=rate, delay_s=parse_delay(options.delay))
    except ValueError as error:
        parser.error(str(error))
    trained = curves.read(options.runs) if options.runs else []
    command = "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    picture = options.write.with_suffix(".png").name if options.write else ""
    machines = {name: f"{one['machine']['processor']}, {one['machine']['cores']} cores" for name, one in swept.items()}
    lines = text(found, trained, command, picture, machines)
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
        draw(found, trained, options.write.with_suffix(".png"))


def by_workers(trained: Sequence[Curves]) -> dict[str, dict[int, tuple[float, float]]]:
    """Returns mean and standard deviation of the last metric, by method and number of workers, of methods with several."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for one in sorted(trained, key=lambda c: c.workers):
        last = [values[-1] for values in one.values.values()]
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        found.setdefault(one.name, {})[one.workers] = (statistics.fmean(last), spread)
    return {name: line for name, line in found.items() if len(line) > 1}


def text(
    found: Scaling, trained: Sequence[Curves], command: str, picture: str, machines: Mapping[str, str]
) -> list[str]:
    """Returns the lines of the page; ``machines`` says by file where its cells were measured."""
    turns = ", ".join(f"{name} at {n}" for name, n in scaling.best(found.strong).items())
    alone = ", ".join(f"{seconds:.3g} s on {n} workers" for n, seconds in found.computing.items())
    lines = [
        "# Scaling",
        "",
        f"```\n{command}\n```",
        "",
        f"Speed-up over one worker that exchanges nothing. Model: {found.model} of [slow links](../network.md), links of"
        f" {rate_name(found.rate)} and {delay_name(found.delay_s)}. A worker's step computes for {found.compute:.3g} s.",
        "",
        *([f"![Efficiency and speed-up by workers]({picture})", ""] if picture else []),
        "## Weak scaling: each worker's batch stays",
        "",
        "**Modelled** by the planner's formulas, with the computation and the arithmetic that the sweep measured between two"
        f" processes, the full rate of the links and {1e6 * LATENCY:g} us beside their delay; nothing overlaps. In brackets,"
        " **emulated**: whole steps of so many real processes, against a step of as many without an exchange. That takes"
        f" {alone}: where processes share cores they compute for longer, and an exchange is a smaller part of their step."
        f" Machines: {'; '.join(f'{name} {machine}' for name, machine in machines.items())}.",
        "",
        *scaling.table(found.weak, found.measured),
        "",
        "## Strong scaling: the batch of all together stays",
        "",
        f"**Modelled** in the same way. One worker computes what {WHOLE} do above, and N workers an N-th of it each; that small"
        " parts compute less efficiently is not in it. Nothing of this was measured.",
        "",
        *scaling.table(found.strong, {}),
        "",
        f"More workers are no faster from: {turns or 'none of these'}.",
        "",
    ]
    lines += ["## What training gives with more workers", ""]
    kept = by_workers(trained)
    if not kept:
        return [*lines, "No task was trained with several numbers of workers here (`--runs`)."]
    sizes = sorted({n for line in kept.values() for n in line})
    metric, task = trained[0].metric, trained[0].task
    scale, unit = (100, " (%)") if metric == "accuracy" else (1, "")
    rows = [
        (name, *(f"{scale * line[n][0]:.4g} ± {scale * line[n][1]:.2g}" if n in line else "-" for n in sizes))
        for name, line in kept.items()
    ]
    return [
        *lines,
        f"**Measured:** {metric}{unit} on {task} after the last epoch, by simulated workers that share one batch; mean and"
        " standard deviation over the seeds.",
        "",
        *_markdown.table(("method", *map(str, sizes)), rows, align="lr"),
    ]


def draw(found: Scaling, trained: Sequence[Curves], path: pathlib.Path) -> None:
    """Writes the picture: both kinds of scaling, and the metric where there are runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kept = by_workers(trained)
    figure, panels = plt.subplots(1, 3 if kept else 2, figsize=(16 if kept else 11, 5.6), layout="constrained")
    weak, strong = panels[:2]
    # A method has one colour in all panels.
    colours = dict(zip(dict.fromkeys([*found.weak, *kept]), itertools.cycle(COLOURS), strict=False))
    for name, line in found.weak.items():
        style, colour = "--" if name.startswith("dense") else "-", colours[name]
        weak.plot(list(line), [100 * line[n] / n for n in line], style, color=colour, lw=1.5, label=name)
        measured = found.measured[name]
        weak.plot(list(measured), [100 * measured[n] / n for n in measured], "o", color=colour, markersize=6)
        strong.plot(list(line), [found.strong[name][n] for n in line], style, color=colour, lw=1.5)
    sizes = list(line)
    weak.set(xlabel="workers", ylabel="efficiency (%)", title="weak scaling (modelled; dots emulated)", ylim=(0, None))
    strong.plot(sizes, sizes, ":", color="0.6")
    strong.set(xlabel="workers", ylabel="speed-up over one worker", title="strong scaling (modelled)")
    strong.set_yscale("log", base=2)
    for number, (name, line) in enumerate(kept.items()):
        means, spreads = zip(*line.values(), strict=True)
        look = {"marker": "o", "capsize": 3, "color": colours[name], "label": name}
        panels[2].errorbar(curves.beside(line, number, len(kept)), means, spreads, **look)
    if kept:
        panels[2].set(xlabel="simulated workers", ylabel=trained[0].metric, title=f"{trained[0].task} (measured)")
        panels[2].legend(fontsize=8)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.25)
    strong.yaxis.set_major_formatter("{x:g}")
    figure.legend(*weak.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"{found.model}, {rate_name(found.rate)}, {delay_name(found.delay_s)}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
