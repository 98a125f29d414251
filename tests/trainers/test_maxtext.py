"""The recipes docs/trainers/maxtext_*.py on eight simulated devices, beside MaxText's own steps."""

import functools
import importlib.util
import os
import sys
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

OUTER: dict[str, list[str]] = {
    "whole": [],
    # Three fragments take turns, every second step: the embedding, and each of the two layers.
    "streaming": ["enable_streaming_diloco=true", "num_diloco_fragments=3", "diloco_sync_period=6"],
    "fsdp and tensor": ["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"],
}
"""Options of MaxText for what a step synchronizes, and where the parameters lie in a replica."""


# In bfloat16 MaxText's own losses differ by more than 1e-3 between two layouts of its mesh.
EVERY_STEP = ["enable_diloco=false", "dtype=float32"]


@pytest.fixture(scope="module", autouse=True)
def _settings_of_others():
    """Undoes what MaxText sets for its process, and that a recipe imports the other."""
    names = ("jax_default_prng_impl", "jax_use_shardy_partitioner", "jax_remove_size_one_mesh_axis_from_type")
    values = {name: getattr(jax.config, name) for name in names}
    environment = dict(os.environ)
    yield
    for name, value in values.items():
        jax.config.update(name, value)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules.pop("maxtext_outer", None)


@functools.cache
def recipe(name: str = "outer") -> Any:
    if name != "outer":
        sys.modules["maxtext_outer"] = recipe()
    spec = importlib.util.spec_from_file_location(f"maxtext_{name}", TRAINERS / f"maxtext_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(steps: int = STEPS, folder: Path | None = None) -> list[str]:
    """The tiny model, with one schedule wherever a run ends; with a folder it keeps checkpoints."""
    each = ["", str(TRAINERS / "maxtext_tiny.yml"), f"steps={steps}", "learning_rate_schedule_steps=40"]
    kept = [f"base_output_directory={folder}", "enable_checkpointing=true", "async_checkpointing=false"]
    return each if folder is None else [*each, *kept, "checkpoint_period=1000"]


@functools.cache
def trained(name: str, outer: str = "whole") -> SimpleNamespace:
    """A run of one method from its first step to its last."""
    paper = ["diloco_outer_lr=1", "diloco_outer_momentum=0"] if name == "sparse_loco" else []
    config, loop, exchanges = recipe().setup([*options(), *OUTER[outer], *paper], recipe().METHODS.get(name))
    step = recipe().compile_step(config, loop, exchanges)
    state, losses = recipe().run(config, loop, step)
    return SimpleNamespace(step=step, config=config, mesh=loop[4], state=state, losses=losses)


def sent(run: SimpleNamespace) -> dict[str, int]:
    return recipe().sent(run.step, run.mesh, run.config)


@functools.cache
def gradients(name: str) -> SimpleNamespace:
    """A run with an exchange of gradients in every step, or of MaxText's own step with replicas along ``data``."""
    along_data = ["ici_diloco_parallelism=1", "ici_data_parallelism=2"] if name == "maxtext" else []
    config, loop, exchange = recipe("gradients").setup(
        [*options(), *EVERY_STEP, *along_data], recipe().METHODS.get(name)
    )
    step = recipe("gradients").compile_step(config, loop, exchange)
    state, losses = recipe("gradients").run(config, loop, step)
    along, _ = recipe("gradients").sent(step, loop[3], "data" if along_data else "diloco")
    return SimpleNamespace(step=step, along=along, state=state, losses=losses)


def same(one: Any, other: Any) -> None:
    """Compares all leaves of two states, bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.leaves(one)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        a, b = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def nonzero(state: Any) -> bool:
    return any(np.any(np.asarray(x)) for x in jax.tree.leaves(state))


@pytest.mark.parametrize("outer", ["whole", "streaming"])
def test_the_dense_exchange_trains_as_maxtexts_own_mean(outer: str) -> None:
    np.testing.assert_allclose(trained("dense", outer).losses, trained("maxtext", outer).losses, atol=1e-3)


@pytest.mark.parametrize(("name", "factor"), [("int4", 7), ("sparse_loco", 60)])
def test_an_outer_step_sends_fewer_bytes_along_the_axis(name: str, factor: int) -> None:
    assert 0 < sent(trained(name))["all"] * factor < sent(trained("maxtext"))["all"]


def test_each_fragment_sends_fewer_bytes_along_the_axis() -> None:
    own, ours = sent(trained("maxtext", "streaming")), sent(trained("int4", "streaming"))
    assert own.keys() == ours.keys() == {"nothing", "fragment 0", "fragment 1", "fragment 2"}
    assert all(0 < ours[what] * 7 < own[what] for what in own if what != "nothing")


@pytest.mark.parametrize(
    ("name", "outer"),
    [
        ("dense", "whole"),
        ("int4", "whole"),
        ("sparse_loco", "whole"),
        ("int4", "streaming"),
        ("int4", "fsdp and tensor"),
    ],
)
def test_a_step_without_an_outer_step_sends_what_maxtexts_sends(name: str, outer: str) -> None:
    own, ours = (
        gc.wire_bytes(run.step, mesh=run.mesh, branch=0).by("kind", "dtype", "axis")
        for run in (trained("maxtext", outer), trained(name, outer))
    )
    assert ours == own


@pytest.mark.parametrize(("name", "outer"), [("int4", "whole"), ("sparse_loco", "whole"), ("int4", "streaming")])
def test_the_loss_falls(name: str, outer: str) -> None:
    losses = trained(name, outer).losses
    assert len(losses) == STEPS
    assert losses[-1] < 0.6 * losses[0]
    # The first step after an outer one shows the agreed parameters.
    assert losses[8] < losses[4] < losses[0]


def test_parameters_along_two_axes_of_a_replica_are_sent_by_their_shards() -> None:
    own, ours = trained("maxtext", "fsdp and tensor"), trained("int4", "fsdp and tensor")
    np.testing.assert_allclose(ours.losses, own.losses, rtol=0.01)
    assert 0 < sent(ours)["all"] * 7 < sent(own)["all"]
    assert sent(ours)["all"] < 1.01 * sent(trained("int4"))["all"]
    # Inside a replica a step that synchronizes moves the updates of what no axis divides, and gathers no movement.
    nothing, every = (gc.wire_bytes(ours.step, mesh=ours.mesh, branch=branch).sent for branch in (0, 1))
    added = (every - sent(ours)["all"]) - (nothing - sent(ours)["nothing"])
    assert 0 <= added < 0.01 * sent(own)["all"]


@pytest.mark.parametrize("outer", ["whole", "streaming"])
def test_a_restored_run_is_the_unbroken_one(outer: str, tmp_path) -> None:
    method, whole = recipe().METHODS["int4"], trained("int4", outer)
    config, loop, exchanges = recipe().setup([*options(BREAK, tmp_path), *OUTER[outer]], method)
    saved, first = recipe().run(config, loop, whole.step)

    config, loop, _ = recipe().setup([*options(STEPS, tmp_path), *OUTER[outer]], method)
    restored = loop[-1]
    assert int(restored.step) == BREAK
    kept = restored.outer_opt_state[1:]
    assert len(kept) == len(exchanges) == (3 if outer == "streaming" else 1)
    assert all(map(nonzero, kept)), "no residual was kept"
    same(restored, saved)
    state, last = recipe().run(config, loop, whole.step)
    same(state, whole.state)
    assert first + last == whole.losses


def test_dense_gradients_train_as_maxtexts_own_step() -> None:
    np.testing.assert_allclose(gradients("dense").losses, gradients("maxtext").losses, atol=1e-4)


def test_gradients_send_fewer_bytes_between_replicas() -> None:
    assert 0 < gradients("int4").along * 4 < gradients("maxtext").along


def test_the_loss_falls_with_compressed_gradients() -> None:
    losses = gradients("int4").losses
    assert len(losses) == STEPS
    assert losses[-1] < 0.6 * losses[0]


def test_a_restored_run_with_compressed_gradients_is_the_unbroken_one(tmp_path) -> None:
    method, whole = recipe().METHODS["int4"], gradients("int4")
    config, loop, _ = recipe("gradients").setup([*options(BREAK, tmp_path), *EVERY_STEP], method)
    saved, first = recipe("gradients").run(config, loop, whole.step)

    config, loop, _ = recipe("gradients").setup([*options(STEPS, tmp_path), *EVERY_STEP], method)
    *_, restored, kept = loop
    assert int(restored.optimizer.step[...]) == BREAK
    assert nonzero(kept), "no residual was kept"
    same((restored, kept), saved)
    state, last = recipe("gradients").run(config, loop, whole.step)
    same(state, whole.state)
    assert first + last == whole.losses
