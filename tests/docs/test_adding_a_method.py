"""The worked example of docs/adding_a_method.md: its file and its line are enough."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.cli import method_table
from gradcomp_jax.experiments import recipes, registered
from gradcomp_jax.experiments.tasks import TASKS
from gradcomp_jax.methods import registry
from tests import test_peer_faults as faults
from tests.conformance import methods as cases
from tests.conformance import test_composition as composition
from tests.conformance import test_conformance as conformance
from tests.conformance import test_wire as wire

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "adding_a_method.md"
NAME = "qsparse"


def example(marker: str) -> str:
    found = re.search(rf"<!-- example: {marker} -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{PAGE.name} has no block after <!-- example: {marker} -->"
    return found.group(1)


@pytest.fixture
def method(monkeypatch) -> registry.Method:
    """The example's file, which registers itself; taken out again after the test."""
    monkeypatch.setitem(registry.METHODS, NAME, None)
    exec(compile(example("method"), str(PAGE), "exec"), {"__name__": "example"})
    found = registry.METHODS[NAME]
    monkeypatch.setitem(cases.METHODS, NAME, cases.plain_case(found))
    return found


AS_WRITTEN = """
import sys

import jax
import pytest
import typer.testing

import gradcomp_jax as gc
from gradcomp_jax.cli.app import app
from gradcomp_jax.experiments.recipes import ALL, RECIPES
from gradcomp_jax.planning import traffic

assert gc.__file__.startswith(sys.argv[1]), gc.__file__
assert callable(gc.qsparse) and gc.qsparse is gc.methods.qsparse
assert "qsparse" in RECIPES and ALL[-1] == "qsparse"
method = gc.methods.METHODS["qsparse"]
for name in set(gc.methods.METHODS) - {"dense", "dense_bf16", "dgc", "qsparse"}:
    del gc.methods.METHODS[name]  # Their programs are tested elsewhere.


def printed(*words):
    found = typer.testing.CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    return [line.split() for line in found.stdout.splitlines()]


assert any("`gc.qsparse()`" in line for line in printed("methods", "--markdown"))
asked = ("plan", "--params", "5M", "--methods", "qsparse,dgc", "--prices", "none", "--all")
(row,) = (line for line in printed(*asked) if line[:1] == ["qsparse"])
assert row[-1] in ("always", "never") or row[-1].endswith("bit/s"), row
read = traffic.read(method.build, [jax.ShapeDtypeStruct((4096, 1024), "float32")], 8)
assert traffic.read_method("qsparse", ((4096, 1024),), 8).sent == pytest.approx(read.sent, rel=0.01)
"""


@pytest.mark.slow
def test_the_file_and_the_line_are_enough(tmp_path) -> None:
    """In a copy of the package: a public name, a row of the table, and a plan, though no record has it."""
    pytest.importorskip("typer.testing")
    package = tmp_path / "gradcomp_jax"
    shutil.copytree(pathlib.Path(gc.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "methods" / f"{NAME}.py").write_text(example("method"), encoding="utf-8")
    with (package / "methods" / "every_method.py").open("a", encoding="utf-8") as every:
        every.write(example("line"))
    command = [sys.executable, "-c", AS_WRITTEN, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_it_sends_what_the_page_says(method) -> None:
    row = method_table._row(NAME, 8, (4096, 1024))
    # An index and 8 bits for each of ten entries of a block, and a scale for them.
    rows = 8 * -(-gc.kernels.dealt_rows(4096 * 1024, 1024, (1024,)) // 8)
    assert row.uplink == pytest.approx((10 * (16 + 8) + 32) * rows / (4096 * 1024), rel=1e-3)
    # A residual, and an eighth of one at the owners.
    assert row.state == pytest.approx(4 + 4 / 8, rel=1e-3)


@pytest.mark.parametrize("env", ["vmap", pytest.param("shard_map-auto-vma", marks=pytest.mark.slow)])
def test_it_conforms(method, env: str) -> None:
    conformance.test_replicas_agree_and_nothing_is_lost(NAME, env)
    conformance.test_a_bad_gradient_skips_the_exchange_on_every_worker(NAME, env)


@pytest.mark.slow
def test_it_sends_what_it_says_and_composes(method) -> None:
    wire.test_bytes_are_the_payloads(NAME)
    wire.test_no_dense_collective_of_a_compressed_leaf(NAME)
    composition.test_extra_arguments_and_scan(NAME)
    composition.test_masked_and_partition(NAME)
    composition.test_one_worker_needs_no_axis(NAME)


@pytest.mark.slow
def test_it_has_none_of_the_known_faults(method) -> None:
    faults.test_a_constant_gradient_gets_through(NAME)


def test_it_can_be_compared(method) -> None:
    settings = TASKS["digits"].settings
    tx = registered.make_registered(settings, (), 0, name=NAME)
    params = {"w": np.zeros((64, 32), np.float32)}
    update = jax.vmap(lambda g: tx.update({"w": g}, tx.init(params), params)[0], axis_name=settings.axis_name)
    updates = jax.jit(update)(np.ones((4, 64, 32), np.float32))
    assert np.asarray(updates["w"]).any()
    assert NAME not in recipes.RECIPES, "the example has become a method: the page needs another"


def test_a_fault_in_it_is_found(method, monkeypatch) -> None:
    """The suite that the example passes can fail: a residual that is thrown away does not pass."""
    from gradcomp_jax.memory.residual import Residual

    monkeypatch.setitem(cases.METHODS, NAME, cases.plain_case(method))
    monkeypatch.setattr(Residual, "update", lambda self, target, sent, sent_mask, memory: memory)
    conformance.built.cache_clear()
    with pytest.raises(AssertionError):
        conformance.test_replicas_agree_and_nothing_is_lost(NAME, "vmap")
    conformance.built.cache_clear()
