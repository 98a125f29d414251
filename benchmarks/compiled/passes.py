"""What an exchange of a large gradient tree costs a device, as compiled: memory passes, kernels, temporaries."""

import dataclasses
import json
import pathlib
import time

import jax

import gradcomp_jax as gc
from benchmarks.compiled import model
from benchmarks.compiled.programs import DATA, Topology
from benchmarks.compiled.traffic import traffic
from gradcomp_jax.audit.hlo import parse_module
from gradcomp_jax.methods.registry import METHODS

VARIANTS = {
    "terngrad, downlink='ternary'": lambda: gc.terngrad(axis_name=DATA, downlink="ternary"),
    "dgc, warm_up": lambda: gc.dgc(axis_name=DATA, warm_up=gc.warm_up(100)),
}
"""Options whose programs differ much from those of the defaults."""

TRANSFORMS = ("one_bit_adam", "eden", "demo")
"""Methods with two phases, or with a transform there and one back."""

CASES = {name: lambda method=method: method.build(axis_name=DATA) for name, method in METHODS.items()} | VARIANTS


@dataclasses.dataclass(frozen=True)
class Row:
    """What one update of a method costs.

    Attributes:
        passes: bytes read from main memory and written to it, over those of the gradient, collectives left out.
        counted: the same by the compiler's own count (benchmarks/compiled/traffic.py says what is wrong with it).
        kernels: what a device launches, loops as often as they run, collectives left out.
        temporaries: bytes over those of the gradient.
        sent: bytes that one worker sends.
        seconds: CPU time to trace and to compile.
    """

    passes: float
    counted: float
    kernels: int
    temporaries: float
    sent: int
    seconds: float


def measure(case: str, params: model.Shapes, topology: Topology, **options: str) -> Row:
    """Compiles one update of a case for a gradient tree, with its state donated; ``options`` are the compiler's."""
    began = time.process_time()
    lowered = gc.lower_update(params, CASES[case](), topology.mesh(), axis_name=topology.axis_name)
    compiled = lowered.compile(compiler_options=options or None)
    seconds, gradient = time.process_time() - began, model.gradient_bytes(params)
    moved = traffic(compiled.as_text())
    return Row(
        passes=round(moved.bytes / gradient, 2),
        counted=round(bytes_accessed(compiled) / gradient, 2),
        kernels=moved.launches,
        temporaries=round(compiled.memory_analysis().temp_size_in_bytes / gradient, 2),
        sent=gc.wire_bytes(compiled, branch=-1).sent,
        seconds=round(seconds, 1),
    )


def goal(method: str, params: model.Shapes) -> tuple[float, int, float]:
    """Returns what passes, kernels and temporaries should not be above."""
    most = 12 if method in TRANSFORMS else 7 if METHODS[method].kept == "nothing" else 10
    return most, 2 * len(params) + 30, 0.5


def within(row: Row, most: tuple[float, int, float]) -> bool:
    """Whether a row is not above a goal, or a ceiling."""
    return row.passes <= most[0] and row.kernels <= most[1] and row.temporaries <= most[2]


def bytes_accessed(compiled: jax.stages.Compiled) -> float:
    """Bytes that a program reads and writes, by its compiler's count."""
    costs = compiled.cost_analysis()
    if not costs:
        # Without a GPU the plugin's client answers with nothing; XLA's own count of the same program needs no client of it.
        from jax._src.lib import _jax

        (module,) = compiled.runtime_executable().hlo_modules()
        costs = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return costs["bytes accessed"] + bytes_of_pallas(compiled.as_text())


def bytes_of_pallas(text: str) -> int:
    """Bytes that kernels of Pallas read and write, which the count leaves out.

    Ours take each block of an operand in once, and each of the result out.
    """
    return sum(
        array.bytes
        for computation in parse_module(text).computations.values()
        for call in computation.instructions.values()
        if call.opcode == "custom-call" and call.attributes.get("custom_call_target") == "tpu_custom_call"
        for array in (*computation.operand_shapes(call), *call.shapes)
    )


class Rows:
    """Rows by tree and case, kept in a JSON file so that a run that was cut goes on where it was."""

    def __init__(self, path: str = ""):
        self._path = pathlib.Path(path) if path else None
        found = json.loads(self._path.read_text()) if self._path and self._path.exists() else {}
        self.found = {key: {name: Row(**row) for name, row in rows.items()} for key, rows in found.items()}

    def get(self, case: str, tree: str, topology: Topology) -> Row:
        """The row as it was kept, else compiled now."""
        rows = self.found.setdefault(f"{topology.name}, {tree}", {})
        if case not in rows:
            rows[case] = measure(case, model.TREES[tree](), topology)
            # Rows share no programs.
            jax.clear_caches()
            self._write()
        return rows[case]

    def kept(self, case: str, tree: str, topology: Topology) -> Row | None:
        """The row, if there is one."""
        return self.found.get(f"{topology.name}, {tree}", {}).get(case)

    def _write(self) -> None:
        if self._path:
            plain = {
                key: {name: dataclasses.asdict(row) for name, row in rows.items()} for key, rows in self.found.items()
            }
            self._path.write_text(json.dumps(plain, indent=1) + "\n")
