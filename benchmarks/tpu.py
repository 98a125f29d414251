"""What the train step of every method sends and keeps on TPU topologies, from programs of the real TPU compiler.

    python benchmarks/tpu.py                            # prints the tables
    python benchmarks/tpu.py --write docs/tpu.md        # and writes them between the page's markers
    python benchmarks/tpu.py --topology 'v5e 4x4' --method dgc

Needs libtpu (pip install '.[tpu]') and no TPU: programs are compiled, not run.
"""

import argparse
import importlib.metadata
import os
import pathlib
from collections.abc import Iterable

from gradcomp_jax import _markdown

MARKERS = "<!-- tpu-table -->", "<!-- /tpu-table -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="", help="one of the topologies (default: all)")
    parser.add_argument("--method", default="", help="one of the registered methods (default: all)")
    parser.add_argument("--write", default="", metavar="PAGE", help="a Markdown page with the markers of the tables")
    return parser.parse_args()


def collectives(rows: Iterable) -> str:
    """Kinds with their element types: ``all-gather u16 u32, all-to-all u8``."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(row.kind, set()).add(row.dtype)
    return ", ".join(f"{kind} {' '.join(sorted(kinds[kind]))}" for kind in sorted(kinds))


def one_slice(tpu, topology: str, methods: list[str]) -> list[str]:
    baseline = tpu.train_step("dense_bf16", topology).made.sent
    rows = []
    for method in methods:
        program = tpu.train_step(method, topology)
        sent = program.made.sent
        rows.append(
            (
                f"`{method}`",
                f"{sent:,}",
                f"{baseline / sent:.2f}",
                f"{program.memory.temp_size_in_bytes / tpu.gradient_bytes():.2f}",
                f"{program.peak / 1e6:.1f}",
                collectives(program.made.rows),
            )
        )
    header = ("method", "bytes sent", "fewer than bf16", "temporaries / gradient", "memory MB", "collectives")
    return [f"### {topology}", "", *_markdown.table(header, rows, align="l" + "r" * (len(header) - 2) + "l"), ""]


def slices(tpu, topology: str, methods: list[str], *, hierarchical: bool) -> list[str]:
    count = tpu.TOPOLOGIES[topology].slices

    def across(method: str) -> int:
        return tpu.across_slices(tpu.train_step(method, topology, hierarchical=hierarchical).made, count)

    baseline, rows = across("dense_bf16"), []
    for method in methods:
        program = tpu.train_step(method, topology, hierarchical=hierarchical)
        between = [row for row in program.made.rows if row.axis is None or tpu.SLICES in row.axis]
        rows.append(
            (
                f"`{method}`",
                f"{across(method):,}",
                f"{baseline / across(method):.2f}",
                f"{program.made.sent - across(method):,}",
                f"{program.memory.temp_size_in_bytes / tpu.gradient_bytes():.2f}",
                f"{program.peak / 1e6:.1f}",
                collectives(between),
            )
        )
    title = "`hierarchical`: each chip's shard between slices" if hierarchical else "all chips as workers"
    header = (
        "method",
        "bytes across slices",
        "fewer than bf16",
        "bytes inside",
        "temporaries / gradient",
        "memory MB",
        "collectives across slices",
    )
    return [
        f"### {topology}, {title}",
        "",
        *_markdown.table(header, rows, align="l" + "r" * (len(header) - 2) + "l"),
        "",
    ]


def heading(tpu) -> list[str]:
    from gradcomp_jax.experiments.machine import machine, versions

    found = versions() | {"libtpu": importlib.metadata.version("libtpu")}
    named = ", ".join(f"{package} {found[package]}" for package in ("jax", "jaxlib", "libtpu", "optax"))
    values = tpu.gradient_bytes() // 4
    on = machine()
    return [
        f"Command: `python benchmarks/tpu.py`. Compiled, not run, with {named} on {on['cores']} cores of"
        f" {on['processor']}. Model: {len(tpu.parameters())} leaves, {values:,} float32 values, {tpu.BATCH} examples a chip.",
        "",
    ]


def tables(tpu, topologies: list[str], methods: list[str]) -> str:
    lines = heading(tpu)
    for topology in topologies:
        if tpu.TOPOLOGIES[topology].slices == 1:
            lines += one_slice(tpu, topology, methods)
        else:
            for hierarchical in (True, False):
                lines += slices(tpu, topology, methods, hierarchical=hierarchical)
    return "\n".join(lines)


def write(page: pathlib.Path, text: str) -> None:
    """Puts the tables between the page's markers.

    Raises:
        SystemExit: if the page has no markers.
    """
    start, end = MARKERS
    before, found, rest = page.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has no {start} ... {end}")
    page.write_text(f"{before}{start}\n\n{text.rstrip()}\n\n{end}{after}")


def main() -> None:
    options = arguments()
    # The host's own devices are not used, and looking for a TPU would take the compiler's lock.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import tpu_programs as tpu

    if not tpu.available():
        raise SystemExit("libtpu is not installed: pip install '.[tpu]'")
    for chosen, known in ((options.topology, tpu.TOPOLOGIES), (options.method, tpu.METHODS)):
        if chosen and chosen not in known:
            raise SystemExit(f"known are {', '.join(known)}; got {chosen!r}")
    if options.write and (options.topology or options.method):
        raise SystemExit("--write takes all topologies and methods")
    text = tables(
        tpu,
        [options.topology] if options.topology else list(tpu.TOPOLOGIES),
        [options.method] if options.method else list(tpu.METHODS),
    )
    print(text)
    if options.write:
        write(pathlib.Path(options.write), text)


if __name__ == "__main__":
    main()
