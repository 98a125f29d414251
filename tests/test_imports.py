"""The layers of the package, read from its imports and enforced.

A module imports from lower layers, or from its own folder. Two folders of one layer do not know
each other. The face of the package, ``gradcomp_jax/_public.py``, gathers the public names and is
free to import anything; ``gradcomp_jax/__init__.py`` imports it when a name is asked for.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "gradcomp_jax"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

# A folder, or a file that lies directly in the package -> its layer. A new one is added here.
LAYERS = {
    "_typing": 0,
    "_compat": 0,
    "_arguments": 0,
    "_checks": 0,
    "_counters": 0,
    "_errors": 0,
    "_everyone": 0,
    "_files": 0,
    "_process": 0,
    "_costs": 0,
    "_markdown": 0,
    "_origins": 0,
    "_specs": 0,
    "_registered": 0,
    "_tracking": 0,
    "per_device": 0,
    "kernels": 1,
    "compressors": 2,
    "memory": 2,
    "collectives": 3,
    "audit": 3,
    "core": 4,
    "testing": 4,
    "transforms": 5,
    "methods": 6,
    "replicas": 6,
    "training": 7,
    "planning": 7,
    "distributed": 7,
    "islands": 7,
    "experiments": 8,
    "cli": 9,
}
# What `import gradcomp_jax` offers reaches up to layer 7: only layers above may use it.
FACE_LAYER = 7
# Libraries that only this layer and the ones above it may import.
LOWEST_LAYER_FOR = {"optax": 4, "argparse": 9, "typer": 9, "rich": 9}
KERNEL_LIBRARIES = {"jax", "numpy"}
JAX_INTERNALS = ("jax._src", "jax.core", "jax.extend")
VARYING_ATTRIBUTES = {"manual_axis_type", "vma"}
MAX_LINES = 350


def unit_of(path: str) -> str:
    """Returns the folder, or the file without its suffix, that a path in the package is in."""
    return path.split("/")[0].removesuffix(".py")


def _home(unit: str) -> str:
    """Returns the folder of a unit: the files of layer 0 lie together in the package itself."""
    return "base" if LAYERS[unit] == 0 else unit


def imported_names(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) of every import in a file, in functions as well."""
    package = [PACKAGE, *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = [*start, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*module, alias.name])


def _layer_fault(unit: str, name: str) -> str | None:
    """Says what is wrong with a module of ``unit`` importing ``name``, or None."""
    layer = LAYERS[unit]
    library, *rest = name.split(".")
    if library != PACKAGE:
        lowest = LOWEST_LAYER_FOR.get(library, 0)
        if layer < lowest:
            return f"{unit} (layer {layer}) imports {library}: only layers {lowest} and up may"
        known = library in KERNEL_LIBRARIES or library in sys.stdlib_module_names
        if unit == "kernels" and not known:
            return f"kernels import jax, numpy and layer 0 only, not {library}"
        return None
    if not rest or rest[0] not in LAYERS:
        if layer > FACE_LAYER:
            return None
        return f"{unit} (layer {layer}) imports {name} from the face: import the module it is in"
    target = rest[0]
    if _home(target) == _home(unit) or LAYERS[target] < layer:
        return None
    return f"{unit} (layer {layer}) imports {target} (layer {LAYERS[target]}): only lower layers may be imported"


def _is_internal(name: str) -> bool:
    return any(name == inner or name.startswith(inner + ".") for inner in JAX_INTERNALS)


def _jax_aliases(tree: ast.Module) -> set[str]:
    """Returns the names under which a file knows the jax module."""
    return {
        alias.asname or "jax"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "jax" or (alias.asname is None and alias.name.startswith("jax."))
    }


def internals_used(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """Yields (line, what) for every use of jax's internals or of an array's varying axes."""
    for line, name in imported_names(tree, path):
        if _is_internal(name):
            yield line, name
    aliases = _jax_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in VARYING_ATTRIBUTES:
                yield node.lineno, f".{node.attr}"
            elif isinstance(node.value, ast.Name) and node.value.id in aliases and _is_internal(f"jax.{node.attr}"):
                yield node.lineno, f"jax.{node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            asked = {a.value for a in node.args if isinstance(a, ast.Constant)}
            for name in sorted(asked & VARYING_ATTRIBUTES):
                yield node.lineno, f".{name}"


def violations(sources: dict[str, str]) -> list[str]:
    """Returns every breach of the rules, as ``path:line: what is wrong``.

    Args:
      sources: path inside the package, with forward slashes -> source text.
    """
    found = []
    for path, text in sorted(sources.items()):
        lines = len(text.splitlines())
        if lines > MAX_LINES:
            found.append(f"{path}:{lines}: more than {MAX_LINES} lines: split it by idea")
        tree, unit = ast.parse(text), unit_of(path)
        if path != "_compat.py":
            for line, what in internals_used(tree, path):
                found.append(f"{path}:{line}: {what} belongs in _compat.py only")
        if path in ("__init__.py", "_public.py"):
            continue
        if unit not in LAYERS:
            remedy = "add it to LAYERS in tests/test_imports.py"
            found.append(f"{path}:1: {unit} has no layer: {remedy}")
            continue
        faults = {(line, _layer_fault(unit, name)) for line, name in imported_names(tree, path)}
        found += [f"{path}:{line}: {fault}" for line, fault in sorted(faults, key=str) if fault]
    return found


def test_package_obeys_its_layers():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    assert "__init__.py" in sources
    assert {unit_of(path) for path in sources} >= {"kernels", "compressors", "transforms"}
    assert not (found := violations(sources)), "\n" + "\n".join(found)


def test_every_folder_has_a_layer():
    """A folder without a Python file, data for instance, is seen as well."""
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    unknown = sorted(folders - LAYERS.keys())
    assert not unknown, f"add {unknown} to LAYERS in tests/test_imports.py"


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("kernels/a.py", "from gradcomp_jax.memory import residual", "imports memory (layer 2)"),
        ("kernels/a.py", "import gradcomp_jax.memory.residual", "imports memory (layer 2)"),
        ("kernels/a.py", "from ..memory import residual", "imports memory (layer 2)"),
        ("kernels/a.py", "from .. import memory", "imports memory (layer 2)"),
        ("kernels/deep/a.py", "from ...memory import residual", "imports memory (layer 2)"),
        ("kernels/a.py", "def f():\n  from ..memory import residual", "a.py:2: kernels (layer 1)"),
        ("kernels/a.py", "from gradcomp_jax import terngrad", "from the face"),
        ("kernels/a.py", "import chex", "not chex"),
        ("audit/a.py", "from ..collectives import gather", "imports collectives (layer 3)"),
        ("per_device.py", "from .kernels import pack", "imports kernels (layer 1)"),
        ("collectives/a.py", "import optax", "only layers 4 and up"),
        ("experiments/a.py", "import argparse", "only layers 9 and up"),
        ("experiments/a.py", "from ..cli import main", "imports cli (layer 9)"),
        ("attic/a.py", "", "add it to LAYERS in tests/test_imports.py"),
        ("memory/a.py", "import jax._src.core", "jax._src.core belongs in _compat.py"),
        ("memory/a.py", "from jax import core", "jax.core belongs in _compat.py"),
        ("memory/a.py", "import jax\njax.core.Tracer", "a.py:2: jax.core belongs"),
        ("memory/a.py", "import jax as j\nj.extend.backend", "a.py:2: jax.extend belongs"),
        ("memory/a.py", "def f(x, t):\n  return t(x).vma", "a.py:2: .vma belongs"),
        ("memory/a.py", "def f(t):\n  return t.manual_axis_type", ".manual_axis_type belongs"),
        ("memory/a.py", "def f(t):\n  return getattr(t, 'vma', None)", ".vma belongs"),
        ("__init__.py", "from jax.core import Tracer", "jax.core.Tracer belongs"),
        ("memory/a.py", "x = 1\n" * (MAX_LINES + 1), f"more than {MAX_LINES} lines"),
    ],
)
def test_checker_finds(path: str, source: str, expected: str):
    found = violations({path: source})
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from gradcomp_jax.cli import main\nimport optax"),
        ("kernels/a.py", "import math\nimport jax.numpy as jnp\nfrom jax import lax, numpy"),
        ("kernels/a.py", "from .pack import base3\nfrom .._checks import positive"),
        ("kernels/deep/a.py", "from ..pack import base3\nfrom gradcomp_jax.kernels import pack"),
        ("per_device.py", "from gradcomp_jax import _compat\nfrom ._typing import Array"),
        ("transforms/a.py", "import optax\nfrom gradcomp_jax.collectives import gather"),
        ("methods/a.py", "from gradcomp_jax import compressors, memory"),
        ("cli/a.py", "import typer\nimport gradcomp_jax as gc"),
        ("_compat.py", "from jax._src import core\ndef f(t):\n  return t.vma"),
        ("memory/a.py", "import jaxlib\nimport jax\njax.core_count\nself.core"),
        ("memory/a.py", "x = 1\n" * MAX_LINES),
    ],
)
def test_checker_lets_pass(path: str, source: str):
    assert violations({path: source}) == []


def test_import_loads_no_other_library_and_starts_no_backend():
    """It loads what jax and optax have loaded, no Flax, Orbax or Matplotlib, so it takes little longer than they do.

    A user may still choose devices, or call jax.distributed.initialize, after it.
    """
    program = (
        "import sys, jax, optax\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        "import gradcomp_jax\n"
        "after = {name.partition('.')[0] for name in sys.modules}\n"
        "more = after - before - sys.stdlib_module_names - {'gradcomp_jax'}\n"
        "assert not more, more\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(jax.device_count())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]


def test_the_table_of_layers_is_the_enforced_one() -> None:
    page = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.MULTILINE)
    assert {name: int(layer) for layer, cell in rows for name in re.findall(r"`(\w+)`", cell)} == LAYERS


def test_the_package_is_imported_when_a_name_is_asked_for() -> None:
    code = """
import signal, sys
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
sys.argv = ["gradcomp", "--help"]
import gradcomp_jax as gc
assert "jax" not in sys.modules and gc.__version__
assert gc.dgc.__module__ == "gradcomp_jax.methods.dgc" and "jax" in sys.modules
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
assert {"dgc", "compressors", "wire_bytes"} <= set(dir(gc)) and all(hasattr(gc, name) for name in dir(gc))
names = {}
exec("from gradcomp_jax import *", names)
assert set(dir(gc)) <= set(names)
try:
    gc.no_method
except AttributeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert result.stdout == "module 'gradcomp_jax' has no attribute 'no_method'\n", result.stderr
