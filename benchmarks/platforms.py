"""What every method's arithmetic costs a worker on each platform, for plans where nothing was measured.

    python benchmarks/platforms.py                            # compiles what docs/results/platforms.json has not
    python benchmarks/platforms.py --platform v5e --again     # compiles it again, after a change of the kernels
    python benchmarks/platforms.py --platform cpu --again     # times it on this machine
    python benchmarks/platforms.py --write docs/planner.md    # writes the page's tables, and the file of the package

TPU needs libtpu (pip install '.[tpu]'), GPU its compiler (docs/gpu.md): programs are compiled, not run. A run that was cut goes
on where it was.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
# The host's own devices are not used, and looking for a TPU would take the compiler's lock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Without kernels of Pallas: the compiler says of none of them what it takes, and nobody has timed one on a TPU.
os.environ["GRADCOMP_PALLAS"] = "0"

import jax
import jax.numpy as jnp

import gradcomp_jax as gc
from benchmarks import gpu_programs, tpu_programs
from benchmarks.compiled import model
from benchmarks.compiled.tables import compiled_by
from benchmarks.compiled.traffic import traffic
from benchmarks.pages import write_between
from benchmarks.traffic import CHIPS, LEAVES
from gradcomp_jax import _markdown
from gradcomp_jax._files import write_whole
from gradcomp_jax.experiments.machine import machine
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.planning import PLATFORMS, Workload, break_even, predict, profile_compression
from gradcomp_jax.planning.platforms import ALL_REDUCED, DATA, load

ROWS = pathlib.Path("docs/results/platforms.json")
TREES: dict[str, model.Shapes] = {
    "one": LEAVES["8192 x 1024"],
    "four": {str(n): jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for n in range(4)},
}
CHIP = {name.split()[0]: chip for name, chip in CHIPS.items()}
GPU_LAUNCH = 4e-6
"""Seconds to start a kernel of a GPU: 3 to 5 microseconds are usual."""
H100 = 3.35e12
"""Bytes a second of its memory: NVIDIA's data sheet of the SXM module."""
KINDS = {"v5p": ["TPU v5p", "TPU v5"], "v5e": ["TPU v5 lite", "TPU v5e"], "h100": ["NVIDIA H100"], "cpu": ["cpu"]}
LIKE = {"a100": {"like": "h100", "kinds": ["NVIDIA A100"], "memory_rate": 2.039e12}}
"""Platforms with the programs of another one."""


def row(platform: str, method: str, tree: model.Shapes) -> list[float]:
    """Compiles one update, its state donated: seconds by the compiler, and kernels that run; collectives are left out."""
    chip = CHIP.get(platform)
    topology = chip.topology if chip else gpu_programs.LARGE
    if method == ALL_REDUCED:
        tx = gc.dense(axis_name=topology.axis_name, dtype=jnp.bfloat16, collective="all_reduce")
    else:
        tx = METHODS[method].build(axis_name=topology.axis_name)
    found = traffic(gc.lower_update(tree, tx, topology.mesh(), axis_name=topology.axis_name).compile().as_text())
    if chip:
        return [found.seconds(clock=chip.clock, bandwidth=chip.bandwidth), found.launches]
    return [found.bytes / H100 + found.launches * GPU_LAUNCH, found.launches]


def fill(kept: dict[str, Any], platform: str, methods: list[str], *, again: bool) -> None:
    """Adds what is not there."""
    here = kept.setdefault(platform, {"by": "", "rows": {}})
    rows = here["rows"]
    if again:
        # A run that is cut and started anew without --again goes on.
        rows |= {name: {} for name in ((*methods, ALL_REDUCED) if platform != "cpu" else methods)}
    if platform == "cpu":
        missing = [name for name in methods if not rows.get(name)]
        if missing:
            device, on = profile_compression(missing), machine()
            rows.update(device.copies)
            here |= {
                "by": f"timed on {on['cores']} cores of {on['processor']}",
                "memory_rate": float(f"{device.rate:.2g}"),
            }
    for method in (*methods, ALL_REDUCED) if platform != "cpu" else ():
        for name, tree in TREES.items():
            if name not in rows.get(method, {}):
                rows[method] = rows.get(method, {}) | {name: row(platform, method, tree)}
                here["by"] = compiled_by(tpu_programs if platform in CHIP else gpu_programs)
                print(platform, method, name, *rows[method][name], flush=True)
                jax.clear_caches()
                _keep(kept)
    _keep(kept)


def _keep(kept: dict[str, Any]) -> None:
    write_whole(ROWS, json.dumps(kept, indent=1) + "\n")


def packed(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns what the package has: by method picoseconds a value, kernels for each tensor, and kernels beside.

    The seconds of the larger tensor are met exactly. On TPU the compiler's cycles hold what a kernel takes beside its values:
    the median over the methods of what two trees leave. On GPU it is given.
    """
    large, small = (model.gradient_bytes(tree) // 4 for tree in TREES.values())
    found: dict[str, Any] = {}
    for platform, here in kept.items():
        rows, common = here["rows"], {"kinds": KINDS[platform], "source": here["by"]}
        if platform == "cpu":
            rate = here["memory_rate"]
            methods = {name: [_figure(8e12 * copies / rate), 0, 0] for name, copies in rows.items()}
            found[platform] = common | {"memory_rate": rate, "launch": 0.0, "how": "measured", "methods": methods}
            continue
        launch = GPU_LAUNCH
        if platform in CHIP:
            both = [(*each["one"], *each["four"]) for each in rows.values()]
            left = [(large * t - small * s) / (large * few - small * many) for s, many, t, few in both]
            launch = max(0.0, float(f"{statistics.median(left):.2g}"))
        methods = {}
        for name, each in rows.items():
            seconds, launches = each["one"]
            more = max(0.0, (each["four"][1] - launches) / (len(TREES["four"]) - 1))
            a_tensor = round(min(more, launches), 1)
            ps = 1e12 * (seconds - launches * launch) / large
            methods[name] = [_figure(ps), a_tensor, round(launches - a_tensor, 1)]
        rate, how = (CHIP[platform].bandwidth, "compiled") if platform in CHIP else (H100, "estimated")
        what = (
            "cycles that the compiler expects of each kernel"
            if platform in CHIP
            else "bytes and kernels of compiled programs"
        )
        of = {"source": f"{what}. {here['by']}", "memory_rate": rate, "launch": launch, "how": how}
        found[platform] = common | of | {"methods": methods}
    return found | LIKE


def _figure(number: float) -> float:
    return float(f"{number:.5g}")


def page() -> str:
    """The tables: the figures, and what they make of two questions."""
    shown = list(KINDS)
    header = ["method", *(f"{name}, {what}" for name in shown for what in ("ps a value", "kernels"))]
    cells = []
    for method in (*METHODS, ALL_REDUCED):
        each = [PLATFORMS[name].methods.get(method) for name in shown]
        figures = [text for f in each for text in ((_number(f.ps), _kernels(f)) if f else ("", ""))]
        cells.append([f"`{method}`", *figures])
    lines = [*_markdown.table(header, cells, align="l" + "rr" * len(shown)), ""]
    for name in shown:
        one = PLATFORMS[name]
        launch = f" {1e6 * one.launch:.2g} µs a kernel." if one.launch else ""
        lines.append(f"- `{name}`, **{one.how}**: {one.source.rstrip('.')}.{launch}")
    lines += [
        "",
        "One tensor of 8192 x 1024, 64 workers, no latency: Gbit/s above which the better dense one is faster.",
        "",
    ]
    even = [
        [f"`{method}`", *(_rate(break_even(TENSOR, NODES, method, device=name, prices={})) for name in shown)]
        for method in METHODS
        if not method.startswith("dense")
    ]
    lines += _markdown.table(["method", *shown], even, align="l" + "r" * len(shown))
    lines += [
        "",
        "A billion values in matrices of 1024 x 1024, 64 workers, 400 Gbit/s, 100 ms a step: times as fast as dense.",
        "",
    ]
    cells = [
        [f"`{name}`", *(f"{gain(name, platform):.2f}x" for platform in shown)]
        for name in ("dgc", "block_quantized", "terngrad")
    ]
    lines += _markdown.table(["method", *shown], cells, align="l" + "r" * len(shown))
    return "\n".join([*lines, "", "*`python benchmarks/platforms.py`*"])


NODES = gc.Cluster(64, gc.Link.of_bits(400e9, 0.0))
TENSOR = Workload(0.1, ((8192, 1024),))
BILLION = Workload(0.1, ((1024, 1024),) * 954)


def gain(method: str, platform: str) -> float:
    """How many times as fast as the better dense step, of a billion values at 400 Gbit/s."""
    own, *dense = (
        predict(BILLION, NODES, name, device=platform, prices={}).step for name in (method, "dense", "dense_bf16")
    )
    return min(dense) / own


def _kernels(figures: Any) -> str:
    return f"{figures.beside:,.0f} + {figures.launches:.0f}" if figures.launches or figures.beside else ""


def _rate(rate: float) -> str:
    return {0: "never faster", math.inf: "always faster"}.get(rate) or _number(8 * rate / 1e9)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=KINDS, help="one platform (default: all that can be compiled for here)")
    parser.add_argument("--method", choices=METHODS, help="one method (default: all)")
    parser.add_argument("--again", action="store_true", help="also what is there")
    parser.add_argument(
        "--write", type=pathlib.Path, metavar="PAGE", help="write the page, and the figures of the package"
    )
    options = parser.parse_args()
    kept = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    possible = {"cpu": True, "h100": gpu_programs.available(), **dict.fromkeys(CHIP, tpu_programs.available())}
    if options.platform and not possible[options.platform]:
        parser.error(gpu_programs.MISSING if options.platform == "h100" else tpu_programs.MISSING)
    for name in [options.platform] if options.platform else [name for name in KINDS if possible[name]]:
        fill(kept, name, [options.method] if options.method else list(METHODS), again=options.again)
    if options.write:
        write_whole(DATA, json.dumps(packed(kept), indent=1) + "\n")
        PLATFORMS.update(load())
    text = page()
    print(text)
    if options.write:
        write_between(options.write, "platforms", text)


if __name__ == "__main__":
    main()
