"""The command of benchmarks/tpu.py and benchmarks/gpu.py: what train steps send and keep, and what exchanges cost a device."""

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
from collections.abc import Iterable
from types import ModuleType

from benchmarks.compiled import model
from benchmarks.compiled.passes import CASES, Row, Rows
from benchmarks.compiled.programs import OUTER, Topology, across, train_step
from benchmarks.pages import write_between
from gradcomp_jax import _markdown
from gradcomp_jax.experiments.machine import machine, versions
from gradcomp_jax.methods.registry import METHODS

LAUNCHED = ("dgc", "terngrad", "block_quantized", "topk_sgd")
MANY_LEAVES = "ResNet-50, float32"


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="", help="steps, passes or launches (default: the first two)")
    parser.add_argument("--topology", default="", help="of the train steps: one of the topologies (default: all)")
    parser.add_argument("--method", default="", help="one of the registered methods (default: all)")
    parser.add_argument("--tree", default="", help="one of the trees of the passes (default: all)")
    parser.add_argument(
        "--rows", default="", metavar="FILE", help="JSON that keeps passes: rows in it are not compiled again"
    )
    parser.add_argument(
        "--before", default="", metavar="FILE", help="such a file of earlier code, shown before each figure"
    )
    parser.add_argument("--kept", action="store_true", help="only passes that are in --rows: compile none")
    parser.add_argument("--write", default="", metavar="PAGE", help="a Markdown page with the markers of the tables")
    return parser.parse_args()


def collectives(rows: Iterable) -> str:
    """Kinds with their element types: ``all-gather u16 u32, all-to-all u8``."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(row.kind, set()).add(row.dtype)
    return ", ".join(f"{kind} {' '.join(sorted(kinds[kind]))}" for kind in sorted(kinds))


def one_part(topology: Topology, methods: list[str]) -> list[str]:
    """The table of a slice, or of nodes whose devices are all workers."""
    baseline = train_step("dense_bf16", topology).made.sent
    rows = []
    for method in methods:
        program = train_step(method, topology)
        sent = program.made.sent
        rows.append(
            (
                f"`{method}`",
                f"{sent:,}",
                f"{baseline / sent:.2f}",
                f"{program.memory.temp_size_in_bytes / model.gradient_bytes():.2f}",
                f"{program.peak / 1e6:.1f}",
                collectives(program.made.rows),
            )
        )
    header = ("method", "bytes sent", "fewer than bf16", "temporaries / gradient", "memory MB", "collectives")
    return [f"### {topology.name}", "", *_markdown.table(header, rows, align="l" + "r" * (len(header) - 2) + "l"), ""]


def several_parts(topology: Topology, methods: list[str], words: ModuleType, *, hierarchical: bool) -> list[str]:
    """The table of several slices or nodes."""

    def between(method: str) -> int:
        return across(train_step(method, topology, hierarchical=hierarchical).made, topology.parts)

    baseline, rows = between("dense_bf16"), []
    for method in methods:
        program = train_step(method, topology, hierarchical=hierarchical)
        slow = [row for row in program.made.rows if row.axis is None or OUTER in row.axis]
        rows.append(
            (
                f"`{method}`",
                f"{between(method):,}",
                f"{baseline / between(method):.2f}",
                f"{program.made.sent - between(method):,}",
                f"{program.memory.temp_size_in_bytes / model.gradient_bytes():.2f}",
                f"{program.peak / 1e6:.1f}",
                collectives(slow),
            )
        )
    chip, parts = words.DEVICE, words.PARTS
    title = f"`hierarchical`: each {chip}'s shard between {parts}" if hierarchical else f"all {chip}s as workers"
    header = (
        "method",
        f"bytes across {parts}",
        "fewer than bf16",
        "bytes inside",
        "temporaries / gradient",
        "memory MB",
        f"collectives across {parts}",
    )
    table = _markdown.table(header, rows, align="l" + "r" * (len(header) - 2) + "l")
    return [f"### {topology.name}, {title}", "", *table, ""]


def compiled_by(platform: ModuleType) -> str:
    """The versions and the machine that compiled."""
    plugins = {}
    for package in platform.PACKAGES:
        try:
            plugins[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found = versions() | plugins
    named = ", ".join(f"{package} {found[package]}" for package in ("jax", "jaxlib", *plugins, "optax"))
    on = machine()
    return f"Compiled, not run, with {named} on {on['cores']} cores of {on['processor']}."


def steps(platform: ModuleType, topologies: list[str], methods: list[str]) -> str:
    """The tables of train steps."""
    values = model.gradient_bytes() // 4
    lines = [
        f"Command: `python benchmarks/{platform.COMMAND} --table steps`. {compiled_by(platform)} Model:"
        f" {len(model.parameters())} leaves, {values:,} float32 values, {model.BATCH} examples a {platform.DEVICE}.",
        "",
    ]
    for topology in (platform.TOPOLOGIES[name] for name in topologies):
        if topology.parts == 1:
            lines += one_part(topology, methods)
        else:
            for hierarchical in platform.FORMS:
                lines += several_parts(topology, methods, platform, hierarchical=hierarchical)
    return "\n".join(lines)


def passes(
    platform: ModuleType, trees: list[str], cases: list[str], rows: Rows, before: Rows, *, only_kept: bool
) -> str:
    """The tables of exchanges of large trees; with ``only_kept`` of the rows that there are."""
    get = rows.kept if only_kept else rows.get
    lines = [
        f"Command: `python benchmarks/{platform.COMMAND} --table passes`. {compiled_by(platform)} {platform.LARGE.name}.",
        "",
    ]
    header = ("method", "passes", "counted", "kernels", "temporaries / gradient", "bytes sent", "compilation, CPU s")
    for tree in trees:
        shapes = model.TREES[tree]
        values = model.gradient_bytes(shapes()) // next(iter(shapes().values())).dtype.itemsize
        found = {case: row for case in cases if (row := get(case, tree, platform.LARGE)) is not None}
        if not found:
            continue
        cells = [(f"`{name}`", *compared(row, before.kept(name, tree, platform.LARGE))) for name, row in found.items()]
        leaves = len(shapes())
        lines += [f"### {tree}: {leaves} {'leaf' if leaves == 1 else 'leaves'}, {values:,} values", ""]
        lines += [*_markdown.table(header, cells, align="l" + "r" * (len(header) - 1)), ""]
    return "\n".join(lines)


def launched(platform: ModuleType, rows: Rows, before: str) -> str:
    """The table of launches for many leaves, with those of earlier code, from a JSON file, before figures that differ."""
    earlier = json.loads(pathlib.Path(before).read_text()) if before else {}
    cells = []
    for method in LAUNCHED:
        row = dataclasses.asdict(rows.get(method, MANY_LEAVES, platform.LARGE))
        now = {
            "kernels": f"{row['kernels']:,}",
            "passes": f"{row['passes']:.1f}",
            "temporaries": f"{row['temporaries']:.2f}",
        }
        then = {name: f"{value:,}" for name, value in earlier.get(method, {}).items()}
        both = (dict.fromkeys((then.get(name, text), text)) for name, text in now.items())
        cells.append((f"`{method}`", *map(" → ".join, both)))
    header = ("method", "kernels", "passes", "temporaries / gradient")
    command = f"Command: `python benchmarks/{platform.COMMAND} --table launches`. {compiled_by(platform)}"
    lines = [f"{command} {platform.LARGE.name}, {MANY_LEAVES}.", "", *_markdown.table(header, cells, align="lrrr")]
    return "\n".join(lines)


def compared(now: Row, then: Row | None) -> list[str]:
    """The cells of a row, with the figures of earlier code before those that differ."""

    def texts(row: Row) -> tuple[str, ...]:
        passes = f"{row.passes:.1f}", f"{row.counted:.1f}"
        return *passes, f"{row.kernels:,}", f"{row.temporaries:.2f}", f"{row.sent:,}", f"{row.seconds:.0f}"

    new, old = texts(now), texts(then or now)
    return [text if text == earlier else f"{earlier} → {text}" for text, earlier in zip(new, old, strict=True)]


def main(description: str, platform: ModuleType) -> None:
    """Prints the tables of a platform, and writes them into a page."""
    options = arguments(description)
    if not platform.available():
        raise SystemExit(platform.MISSING)
    for chosen, known in (
        (options.table, ("steps", "passes", "launches")),
        (options.topology, platform.TOPOLOGIES),
        (options.method, CASES),
        (options.tree, model.TREES),
    ):
        if chosen and chosen not in known:
            raise SystemExit(f"known are {', '.join(known)}; got {chosen!r}")
    if options.write and (options.topology or options.method or options.tree):
        raise SystemExit("--write takes all topologies, trees and methods")
    made = {}
    if options.table == "launches":
        made[f"{platform.NAME}-launches"] = launched(platform, Rows(options.rows), options.before)
    if options.table in ("", "steps"):
        topologies = [options.topology] if options.topology else list(platform.TOPOLOGIES)
        methods = [name for name in METHODS if options.method in ("", name)]
        made[f"{platform.NAME}-table"] = steps(platform, topologies, methods)
    if options.table in ("", "passes"):
        cases = [name for name in CASES if options.method in ("", name)]
        trees = [name for name in model.TREES if options.tree in ("", name)]
        made[f"{platform.NAME}-passes"] = passes(
            platform, trees, cases, Rows(options.rows), Rows(options.before), only_kept=options.kept
        )
    for name, text in made.items():
        print(text)
        if options.write:
            write_between(pathlib.Path(options.write), name, text)
