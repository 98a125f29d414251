"""The recipe docs/trainers/maxtext_outer.py on eight simulated devices, beside MaxText's own outer steps."""

import functools
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import gradcomp_jax as gc

TRAINERS = Path(__file__).parents[2] / "docs" / "trainers"
MISSING = "needs MaxText on Python 3.12: pip install --no-deps -r docs/trainers/maxtext_requirements.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    pytest.mark.skipif(importlib.util.find_spec("maxtext") is None, reason=MISSING),
]

STEPS, BREAK = 12, 6
"""An outer step is every fourth; a broken run ends between two."""

COMPRESSED = ("int4", "sparse_loco")


@pytest.fixture(scope="module", autouse=True)
def _settings_of_others():
    """Undoes what MaxText sets for its process."""
    names = ("jax_default_prng_impl", "jax_use_shardy_partitioner", "jax_remove_size_one_mesh_axis_from_type")
    values = {name: getattr(jax.config, name) for name in names}
    environment = dict(os.environ)
    yield
    for name, value in values.items():
        jax.config.update(name, value)
    os.environ.clear()
    os.environ.update(environment)


@functools.cache
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("maxtext_outer", TRAINERS / "maxtext_outer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(steps: int = STEPS, folder: Path | None = None) -> list[str]:
    """The tiny model, with one schedule wherever a run ends; with a folder it keeps checkpoints."""
    each = ["", str(TRAINERS / "maxtext_tiny.yml"), f"steps={steps}", "learning_rate_schedule_steps=40"]
    kept = [f"base_output_directory={folder}", "enable_checkpointing=true", "async_checkpointing=false"]
    return each if folder is None else [*each, *kept, "checkpoint_period=1000"]


@functools.cache
def trained(name: str) -> SimpleNamespace:
    """A run of one method from its first step to its last."""
    outer = ["diloco_outer_lr=1", "diloco_outer_momentum=0"] if name == "sparse_loco" else []
    config, loop, exchange = recipe().setup([*options(), *outer], recipe().METHODS.get(name))
    step = recipe().compile_step(config, loop, exchange)
    state, losses = recipe().run(config, loop, step)
    return SimpleNamespace(step=step, mesh=loop[4], state=state, losses=losses)


def same(one: Any, other: Any) -> None:
    """Compares all leaves of two states, bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.leaves(one)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        a, b = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def test_the_dense_exchange_trains_as_maxtexts_own_mean() -> None:
    np.testing.assert_allclose(trained("dense").losses, trained("maxtext").losses, atol=1e-3)


@pytest.mark.parametrize(("name", "factor"), [("int4", 7), ("sparse_loco", 60)])
def test_an_outer_step_sends_fewer_bytes_along_the_axis(name: str, factor: int) -> None:
    own, ours = (recipe().sent(trained(run).step, trained(run).mesh, syncs=True) for run in ("maxtext", name))
    assert 0 < ours * factor < own


@pytest.mark.parametrize("name", ("dense", *COMPRESSED))
def test_a_step_without_an_outer_step_sends_what_maxtexts_sends(name: str) -> None:
    own, ours = (
        gc.wire_bytes(trained(run).step, mesh=trained(run).mesh, branch=0).by("kind", "dtype", "axis")
        for run in ("maxtext", name)
    )
    assert ours == own


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_loss_falls(name: str) -> None:
    losses = trained(name).losses
    assert len(losses) == STEPS
    assert losses[-1] < 0.6 * losses[0]
    # The first step after an outer one shows the agreed parameters.
    assert losses[8] < losses[4] < losses[0]


def test_a_restored_run_is_the_unbroken_one(tmp_path) -> None:
    method, whole = recipe().METHODS["int4"], trained("int4")
    config, loop, _ = recipe().setup(options(BREAK, tmp_path), method)
    saved, first = recipe().run(config, loop, whole.step)

    config, loop, _ = recipe().setup(options(STEPS, tmp_path), method)
    restored = loop[-1]
    assert int(restored.step) == BREAK
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(restored.outer_opt_state[1])), "no residual was kept"
    same(restored, saved)
    state, last = recipe().run(config, loop, whole.step)
    same(state, whole.state)
    assert first + last == whole.losses


def test_a_mesh_with_two_more_axes_is_refused() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("diloco", "fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"one axis beside 'diloco'.*\['fsdp', 'tensor'\]"):
        recipe().outer_exchange(gc.dense(axis_name="diloco"), mesh, {})
