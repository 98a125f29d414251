"""What an exchange moves over a TPU's main memory: passes with loops' trips, launches, and the time that the compiler expects.

    python benchmarks/traffic.py --rows rows.json             # tables of all trees on both chips
    python benchmarks/traffic.py --method dgc --tree '4096 x 14336' --sources 10
    python benchmarks/traffic.py --rows rows.json --write docs/tpu.md   # and writes them between the page's markers

"a → b" is by XLA's programs alone, and with kernels of Pallas.

Needs libtpu (pip install '.[tpu]') and no TPU: programs are compiled, not run.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
# The host's own devices are not used, and looking for a TPU would take the compiler's lock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import gradcomp_jax as gc
from benchmarks import tpu_programs
from benchmarks.compiled import model
from benchmarks.compiled.passes import CASES as EXCHANGES
from benchmarks.compiled.passes import bytes_accessed
from benchmarks.compiled.programs import DATA, Topology
from benchmarks.compiled.tables import compiled_by
from benchmarks.compiled.traffic import Traffic, traffic
from benchmarks.pages import write_between
from gradcomp_jax import _markdown
from gradcomp_jax.kernels.dealt_on_tpu import SWITCH

ALL_REDUCE = "dense_bf16, all_reduce"
OF_A_LEAF = (
    "dense", "dense_bf16", ALL_REDUCE, "terngrad", "dgc", "topk_sgd", "block_quantized", "powersgd", "one_bit_adam", "demo",
)  # fmt: skip
OF_A_TREE = ("dense", ALL_REDUCE, "terngrad", "dgc", "topk_sgd", "block_quantized")
CASES = {**EXCHANGES, ALL_REDUCE: lambda: gc.dense(axis_name=DATA, dtype="bfloat16", collective="all_reduce")}
CASES |= {
    "int4": lambda: gc.block_quantized(axis_name=DATA, bits=4),
    "mxfp8": lambda: gc.block_quantized(axis_name=DATA, format="mxfp8"),
    "mxfp4": lambda: gc.block_quantized(axis_name=DATA, format="mxfp4"),
    "nvfp4": lambda: gc.block_quantized(axis_name=DATA, format="nvfp4"),
}
WITH_KERNELS = ("dgc", "topk_sgd")
"""Methods that kernels of Pallas serve: they are compiled with them and without."""


def _leaf(rows: int, width: int) -> model.Shapes:
    return {"kernel": jax.ShapeDtypeStruct((rows, width), jnp.float32)}


LEAVES = {"8192 x 1024": _leaf(8192, 1024), "4096 x 14336": _leaf(4096, 14336)}
TREES = {**LEAVES, "LLaMA-like": model.TREES["LLaMA-like, float32"]()}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip, four of them together.

    Attributes:
      topology: of four chips.
      clock: cycles a second that the compiler's estimates are in.
      bandwidth: of main memory, bytes a second.
    """

    topology: Topology
    clock: float
    bandwidth: float


def _chip(name: str, compilers_name: str, memory: int, clock: float, bandwidth: float) -> Chip:
    devices = functools.partial(tpu_programs.compiler_devices, compilers_name)
    return Chip(Topology(name, devices, memory), clock, bandwidth)


# https://cloud.google.com/tpu/docs/v5p and v5e.
CHIPS = {
    "v5p 2x2x1": _chip("v5p 2x2x1", "v5p:2x2x1", 95, 1.75e9, 2765e9),
    "v5e 2x2": _chip("v5e 2x2", "v5e:2x2", 16, 1.5e9, 819e9),
}


def read(method: str, tree: model.Shapes, chip: Chip, *, kernels: bool = True) -> tuple[Traffic, float]:
    """Returns what one update moves, its state donated, and the compiler's own count of bytes."""
    topology = chip.topology
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = str(int(kernels))
    try:
        update = gc.lower_update(tree, CASES[method](), topology.mesh(), axis_name=topology.axis_name)
        compiled = update.compile()
    finally:
        os.environ.pop(SWITCH) if before is None else os.environ.update({SWITCH: before})
    return traffic(compiled.as_text()), bytes_accessed(compiled)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one update costs: passes over the gradient by this measure and by the compiler's count, launches, microseconds."""

    passes: float
    counted: float
    launches: int
    us: float


def measure(method: str, tree: model.Shapes, chip: Chip, *, kernels: bool, sources: int = 0) -> Row:
    """Compiles one update of a method; prints the lines that move most."""
    found, counted = read(method, tree, chip, kernels=kernels)
    gradient = model.gradient_bytes(tree)
    for source, moved in list(found.by_source(3).items())[:sources]:
        print(f"{moved / gradient:8.2f}  {' < '.join(source) or 'of the compiler'}")
    jax.clear_caches()
    us = 1e6 * found.seconds(clock=chip.clock, bandwidth=chip.bandwidth)
    return Row(round(found.bytes / gradient, 2), round(counted / gradient, 2), found.launches, round(us, 1))


def changed(rows: list[Row], cell: Callable[[Row], str]) -> str:
    """Returns a cell of a table: by XLA's programs, then with kernels where they make a difference."""
    return " → ".join(dict.fromkeys(map(cell, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=CASES, help="one method (default: some of each kind)")
    parser.add_argument("--tree", choices=TREES, help="one tree (default: all)")
    parser.add_argument("--chip", choices=CHIPS, help="one kind of chip (default: all)")
    parser.add_argument("--sources", type=int, default=0, metavar="N", help="also the N lines that move most")
    parser.add_argument(
        "--rows", type=pathlib.Path, metavar="FILE", help="keeps what was compiled, and goes on from there"
    )
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="a Markdown page with the tables' markers")
    options = parser.parse_args()
    if not tpu_programs.available():
        parser.error(tpu_programs.MISSING)
    if options.write and (options.method or options.chip or options.tree):
        parser.error("--write takes all methods, trees and chips")
    kept = json.loads(options.rows.read_text()) if options.rows and options.rows.exists() else {}
    chips, tables = [options.chip] if options.chip else list(CHIPS), []
    for name in [options.tree] if options.tree else TREES:
        rows = []
        for method in [options.method] if options.method else OF_A_LEAF if name in LEAVES else OF_A_TREE:
            cells = [f"`{method}`"]
            for chip in chips:
                found = []
                for kernels in (False, True) if method in WITH_KERNELS else (False,):
                    key = f"{chip}, {name}, {method}, {'kernels' if kernels else 'XLA'}"
                    if key not in kept or options.sources:
                        row = measure(method, TREES[name], CHIPS[chip], kernels=kernels, sources=options.sources)
                        kept[key] = dataclasses.asdict(row)
                        print(key, kept[key], file=sys.stderr, flush=True)
                        if options.rows:
                            options.rows.write_text(json.dumps(kept, indent=1) + "\n")
                    found.append(Row(**kept[key]))
                cells += [changed(found, lambda row: f"{row.passes:.1f} ({row.counted:.1f})")]
                cells += [changed(found, lambda row: f"{row.launches:,}"), changed(found, lambda row: f"{row.us:,.0f}")]
            rows.append(tuple(cells))
        header = [name, *(f"{chip}, {what}" for chip in chips for what in ("passes", "launches", "µs"))]
        tables.append("\n".join(_markdown.table(header, rows, align="l" + "rrr" * len(chips))))
    text = "\n\n".join([*tables, f"*{compiled_by(tpu_programs)} `python benchmarks/traffic.py`*"])
    print(text)
    if options.write:
        write_between(options.write, "tpu-traffic", text)


if __name__ == "__main__":
    main()
