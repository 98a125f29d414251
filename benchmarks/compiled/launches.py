"""What a GPU launches and moves for an exchange of many leaves, loops as often as they run."""

import dataclasses
import json
import pathlib

import gradcomp_jax as gc
from benchmarks.compiled import model
from benchmarks.compiled.passes import CASES
from benchmarks.compiled.programs import Topology
from benchmarks.compiled.traffic import traffic
from gradcomp_jax import _markdown

METHODS = ("dgc", "terngrad", "block_quantized", "topk_sgd")
TREE = "ResNet-50, float32"


@dataclasses.dataclass(frozen=True)
class Launches:
    """What one update costs.

    Attributes:
        kernels: launched, loops as often as they run, collectives left out.
        moved: bytes read from main memory and written to it, over those of the gradient. A cut counts as what is cut.
        temporaries: bytes over those of the gradient.
    """

    kernels: int
    moved: float
    temporaries: float


def measure(method: str, topology: Topology, tree: str = TREE) -> Launches:
    """Compiles one update of a method, with its state donated."""
    params = model.TREES[tree]()
    compiled = gc.lower_update(params, CASES[method](), topology.mesh(), axis_name=topology.axis_name).compile()
    read, gradient = traffic(compiled.as_text()), model.gradient_bytes(params)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return Launches(read.launches, round(read.bytes / gradient, 1), round(temporaries / gradient, 2))


def table(topology: Topology, before: str = "") -> list[str]:
    """The rows of all methods, with those of earlier code, from a JSON file, before figures that differ."""
    earlier = json.loads(pathlib.Path(before).read_text()) if before else {}
    rows = []
    for method in METHODS:
        now = dataclasses.asdict(measure(method, topology))
        then = now | earlier.get(method, {})
        cells = [f"{now[name]:,}" if now[name] == then[name] else f"{then[name]:,} → {now[name]:,}" for name in now]
        rows.append((f"`{method}`", *cells))
    return _markdown.table(
        ("method", "kernels", "bytes moved / gradient", "temporaries / gradient"), rows, align="lrrr"
    )
