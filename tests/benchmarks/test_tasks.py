"""Tasks and recipes of the studies: names, data, and ablations that leave out one part and nothing else."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks.tasks import recipes, tasks
from gradcomp_jax import per_device
from gradcomp_jax.experiments import recipes as own
from tests.conformance.environments import AXIS

SETTINGS, STEPS = tasks.TASKS["fashion-mnist"].settings, 468
NEW = [name for name in recipes.RECIPES if name not in own.RECIPES]


@pytest.mark.parametrize("method", NEW)
@pytest.mark.parametrize("dataset", ("digits", "enwik8"))
def test_every_recipe_builds_before_both_optimizers(added, method, dataset):
    settings = tasks.TASKS[dataset].settings
    assert isinstance(own.build(method, settings, STEPS), optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize(
    ("method", "is_kept"), [("dense-bf16-clip", True), ("int8-put-back", True), ("topk-gather", False)]
)
def test_adamw_keeps_a_first_moment_where_the_method_has_none(added, method: str, is_kept: bool) -> None:
    tx = own.build(method, dataclasses.replace(tasks.TASKS["enwik8"].settings, axis_name=AXIS), STEPS)
    state = jax.eval_shape(jax.vmap(tx.init, None, axis_name=AXIS, axis_size=2), {"w": jnp.zeros((64, 32))})
    (found,) = per_device.nodes_of(state, lambda node: hasattr(node, "nu"))
    assert hasattr(found, "mu") == is_kept


def dgc_options(monkeypatch, method):
    """The options with which a recipe calls dgc."""
    seen = []

    def record(**options):
        seen.append(options)
        return optax.GradientTransformationExtraArgs(*optax.identity())

    monkeypatch.setattr(own, "dgc", record)
    own.build(method, SETTINGS, STEPS)
    (options,) = seen
    return options


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("dgc-no-clip", {"clip_norm": None}),
        ("dgc-no-masking", {"masking": False}),
        ("dgc-no-warm-up", {"warm_up": ()}),
        ("dgc-no-correction", {"momentum_correction": False}),
    ],
)
def test_an_ablation_changes_one_option(added, monkeypatch, method, changed):
    full = dgc_options(monkeypatch, "dgc")
    ((name, value),) = changed.items()
    assert full.get(name, True) != value
    assert dgc_options(monkeypatch, method) == {**full, name: value}


def test_the_command_of_the_studies_knows_their_names_and_that_of_the_package_does_not(tmp_path) -> None:
    root = pathlib.Path(__file__).parents[2]
    own_command = [sys.executable, root / "benchmarks" / "gradcomp.py"]
    listed = subprocess.run([*own_command, "methods"], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert all(name in listed.replace(",", " ").split() for name in NEW) and "--methods ablations: " in listed
    assert not any(name in own.RECIPES for name in NEW)
