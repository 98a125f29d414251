"""What an exchange moves over a TPU's main memory: passes with loops' trips, launches, and the time that the compiler expects.

    python benchmarks/traffic.py                              # a table of both chips
    python benchmarks/traffic.py --method dgc --leaf '4096 x 14336' --sources 10
    python benchmarks/traffic.py --write docs/tpu.md          # and writes it between the page's markers

Needs libtpu (pip install '.[tpu]') and no TPU: programs are compiled, not run.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
# The host's own devices are not used, and looking for a TPU would take the compiler's lock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import gradcomp_jax as gc
from benchmarks import tpu_programs
from benchmarks.compiled import model
from benchmarks.compiled.passes import CASES, bytes_accessed
from benchmarks.compiled.programs import Topology
from benchmarks.compiled.tables import compiled_by
from benchmarks.compiled.traffic import Traffic, traffic
from benchmarks.pages import write_between
from gradcomp_jax import _markdown

METHODS = ("dense", "dense_bf16", "terngrad", "dgc", "topk_sgd", "block_quantized", "powersgd")
LEAVES = {
    f"{rows} x {width}": {"kernel": jax.ShapeDtypeStruct((rows, width), jnp.float32)}
    for rows, width in ((8192, 1024), (4096, 14336))
}


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


def read(method: str, tree: model.Shapes, chip: Chip) -> tuple[Traffic, float]:
    """Returns what one update moves, its state donated, and the compiler's own count of bytes."""
    topology = chip.topology
    update = gc.lower_update(tree, CASES[method](), topology.mesh(), axis_name=topology.axis_name)
    compiled = update.compile()
    return traffic(compiled.as_text()), bytes_accessed(compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=CASES, help="one method (default: some of each kind)")
    parser.add_argument("--leaf", choices=LEAVES, default=next(iter(LEAVES)), help="default: %(default)s")
    parser.add_argument("--chip", choices=CHIPS, help="one kind of chip (default: all)")
    parser.add_argument("--sources", type=int, default=0, metavar="N", help="also the N lines that move most")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="a Markdown page with the table's markers")
    options = parser.parse_args()
    if not tpu_programs.available():
        parser.error(tpu_programs.MISSING)
    if options.write and (options.method or options.chip):
        parser.error("--write takes all methods and chips")
    chips, leaf, rows = [options.chip] if options.chip else list(CHIPS), LEAVES[options.leaf], []
    gradient = model.gradient_bytes(leaf)
    for method in [options.method] if options.method else METHODS:
        cells = [f"`{method}`"]
        for chip in (CHIPS[name] for name in chips):
            found, counted = read(method, leaf, chip)
            seconds = found.seconds(clock=chip.clock, bandwidth=chip.bandwidth)
            cells += [f"{found.bytes / gradient:.1f} ({counted / gradient:.1f})", f"{found.launches:,}"]
            cells += [f"{1e6 * seconds:,.0f}"]
            for source, moved in list(found.by_source(3).items())[: options.sources]:
                print(f"{moved / gradient:8.2f}  {' < '.join(source) or 'of the compiler'}")
            jax.clear_caches()
        rows.append(tuple(cells))
        print(*cells, sep=" | ", file=sys.stderr, flush=True)
    header = [f"{options.leaf}", *(f"{chip}, {what}" for chip in chips for what in ("passes", "launches", "µs"))]
    table = "\n".join(_markdown.table(header, rows, align="l" + "rrr" * len(chips)))
    text = f"{table}\n\n*{compiled_by(tpu_programs)} `python benchmarks/traffic.py`*"
    print(text)
    if options.write:
        write_between(options.write, "tpu-traffic", text)


if __name__ == "__main__":
    main()
