"""Every kernel and the full local steps against a copy, on one device.

    python benchmarks/kernels.py --sizes 2^17,2^20,2^25 --out benchmark-results
    python benchmarks/kernels.py --write docs/performance.md    # on a GPU or TPU: and writes the page's section

Each round runs every subject once, one after the other, so that a noisy machine is noisy for all of them; printed are
medians over the rounds with their quartiles, and ratios to a copy (``x * 2``) and to a read pass (``max |x|``) of the same
run. ``passes`` is the compiler's count of bytes read and written over those of the gradient, ``by hand`` the number that
cannot be avoided, and ``of copy`` the bytes by hand a second over those of the copy. Writes a JSON and a PNG.

On an accelerator a step is started ``--calls`` times in a row and the last is waited for: as long as a step takes longer than
to start it, that is the device's time.

A peer is any Python module with ``compress(array) -> payload`` and ``decompress(payload) -> array`` over float32 NumPy
arrays: ``--peer path/to/module.py`` times the two together. PyTorch's PowerSGD hooks run beside ours where torch is installed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.other_compressors import load_peers
from benchmarks.pages import write_between
from benchmarks.subjects import SUBJECTS, Round, Subject
from gradcomp_jax import _markdown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        default="",
        help="entries, separated by commas (default: 2^17,2^20,2^25; on an accelerator 2^20,2^25,2^27)",
    )
    parser.add_argument(
        "--calls",
        type=int,
        default=50,
        help="steps that an accelerator gets in a row (default: %(default)s; on CPU one)",
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed rounds after one that warms up (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="names of subjects, separated by commas; copy and read always run")
    parser.add_argument("--peer", action="append", default=[], help="a module with compress and decompress; repeatable")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch's hooks out")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a Markdown page with a section for this platform")
    return parser.parse_args()


def parse_size(text: str) -> int:
    base, _, power = text.partition("^")
    size = int(float(base) ** int(power)) if power else int(float(text))
    if size < 1:
        raise SystemExit(f"a size must be at least 1, got {text}")
    return size


def measure(running: dict[str, Round], rounds: int, *, calls: int) -> dict[str, list[float]]:
    """Seconds of a step, of every round of every subject, interleaved."""
    for one in running.values():
        jax.block_until_ready(one.step())
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, one in running.items():
            begin = time.perf_counter()
            for _ in range(calls):
                last = one.step()
            jax.block_until_ready(last)
            seconds[name].append((time.perf_counter() - begin) / calls)
            # Its memory is given back now, not while the next subject is timed.
            last = None
    return seconds


def results_for(subjects: dict[str, Subject], n: int, rounds: int, *, calls: int) -> dict[str, dict[str, float | None]]:
    """Times, ratios and memory passes of every subject for a gradient of ``n`` entries."""
    gradient = jax.numpy.asarray(np.random.default_rng(0).standard_normal(n, dtype=np.float32))
    running = {name: subject.start(gradient) for name, subject in subjects.items()}
    rows: dict[str, dict[str, float | None]] = {}
    for name, row in summary(measure(running, rounds, calls=calls)).items():
        count, by_hand = running[name].read_and_written, subjects[name].passes
        rows[name] = {
            **row,
            "passes": None if count is None else count / (4 * n),
            "passes_by_hand": by_hand,
            "of_copy": None if by_hand is None else by_hand / subjects["copy"].passes / row["copies"],
        }
    return rows


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians and quartiles in milliseconds, and ratios of medians, and of what each round gives."""
    copy, read = seconds["copy"], seconds["read"]
    result = {}
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        result[name] = {
            "ms": 1e3 * middle,
            "ms_low": 1e3 * low,
            "ms_high": 1e3 * high,
            "copies": statistics.median(v / c for v, c in zip(values, copy, strict=True)),
            "reads": statistics.median(v / r for v, r in zip(values, read, strict=True)),
        }
    return result


def table(n: int, rows: dict[str, dict[str, float | None]]) -> str:
    lines = [f"{n:,} entries, float32", ""]
    cells = []
    for name, row in rows.items():
        spread = f"{row['ms']:.4g} ({row['ms_low']:.4g} .. {row['ms_high']:.4g})"
        passes, by_hand = ("-" if p is None else f"{p:.2f}" for p in (row["passes"], row["passes_by_hand"]))
        of_copy = "-" if row["of_copy"] is None else f"{row['of_copy']:.0%}"
        cells.append((name, spread, f"{row['copies']:.2f}", f"{row['reads']:.2f}", passes, by_hand, of_copy))
    heads = ("subject", "ms (quartiles)", "x copy", "x read", "passes", "by hand", "of copy")
    return "\n".join([*lines, *_markdown.table(heads, cells, align="lr")])


def plot(results: dict[int, dict[str, dict[str, float | None]]], path: Path, title: str) -> None:
    """Time against size, ours on the left, the usual formulations and peers on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted(results)
    names = [name for name in results[sizes[0]] if name not in ("copy", "read")]
    others = [name for name in names if name.startswith(("naive", "torch", "peer"))]
    figure, panels = plt.subplots(1, 2, figsize=(15, 7.5), sharex=True, sharey=True, layout="constrained")
    colours = plt.get_cmap("tab10").colors
    markers, styles = "os^Dv", ("-", "--", "-.")
    # The roofline: reading the gradient once, at the best bandwidth that a read pass reached at any size.
    best = max(4 * n / results[n]["read"]["ms"] for n in sizes)
    shown = ([name for name in names if name not in others], others)
    for axes, subset, heading in zip(panels, shown, ("gradcomp_jax", "usual formulations and peers"), strict=True):
        for name, style, width in (("copy", "-", 3.0), ("read", "--", 2.5)):
            axes.plot(sizes, [results[n][name]["ms"] for n in sizes], "k", linestyle=style, linewidth=width, label=name)
        axes.plot(
            sizes, [4 * n / best for n in sizes], color="grey", linestyle=":", label="a read at the best bandwidth seen"
        )
        # The legend in the order of the lines at the largest size.
        for i, name in enumerate(sorted(subset, key=lambda name: -results[sizes[-1]][name]["ms"])):
            axes.plot(
                sizes,
                [results[n][name]["ms"] for n in sizes],
                color=colours[i % 10],
                linestyle=styles[i // 10 % 3],
                marker=markers[i % 5],
                markersize=4,
                linewidth=1.2,
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel="entries (float32)", title=heading)
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
        axes.legend(loc="upper left", fontsize=8, framealpha=0.9)
    panels[0].set_ylabel("milliseconds (median)")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def machine() -> dict[str, str | int | None]:
    device = jax.devices()[0]
    model = next(
        (line.split(":")[1].strip() for line in cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "device": device.device_kind,
        "platform": device.platform,
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    options = arguments()
    wanted = [name for name in options.only.split(",") if name]
    subjects = {name: s for name, s in SUBJECTS.items() if not wanted or name in (*wanted, "copy", "read")}
    subjects |= load_peers(options.peer, torch=not options.no_torch)
    unknown = [name for name in wanted if name not in subjects]
    if unknown:
        raise SystemExit(f"no subject {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    facts = machine()
    on_host = facts["platform"] == "cpu"
    if options.write and on_host:
        raise SystemExit("--write is for an accelerator's section; this is a CPU")
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    sizes = options.sizes or ("2^17,2^20,2^25" if on_host else "2^20,2^25,2^27")
    results = {}
    for n in map(parse_size, sizes.split(",")):
        results[n] = results_for(subjects, n, options.rounds, calls=1 if on_host else options.calls)
        print(f"\n{table(n, results[n])}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"kernels-{facts['platform']}"
    report = {"machine": facts, "rounds": options.rounds, "results": {str(n): rows for n, rows in results.items()}}
    target.with_suffix(".json").write_text(json.dumps(report, indent=1))
    plot(
        results, target.with_suffix(".png"), f"One device: {facts['device']} ({facts['processor']}), jax {facts['jax']}"
    )
    print(f"\nwrote {target}.json and {target}.png")
    if options.write:
        bandwidth = max(8 * n / results[n]["copy"]["ms"] / 1e6 for n in results)
        lines = [
            f"`python benchmarks/kernels.py --sizes {sizes} --rounds {options.rounds} --calls {options.calls}"
            f"{' --no-torch' if options.no_torch else ''}`; measured on {facts['device']},"
            f" Python {facts['python']}, jax {facts['jax']}. The copy reaches {bandwidth:,.0f} GB/s.",
            *(table(n, rows) for n, rows in results.items()),
        ]
        write_between(options.write, f"{facts['platform']}-kernels", "\n\n".join(lines))


if __name__ == "__main__":
    main()
