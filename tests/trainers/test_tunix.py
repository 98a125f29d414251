"""The recipe docs/trainers/tunix_gradients.py on eight simulated devices, beside Tunix's own train step."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import gradcomp_jax as gc

TRAINERS = Path(__file__).parents[2] / "docs" / "trainers"
MISSING = "needs Tunix on Python 3.12: pip install --no-deps -r docs/trainers/tunix_requirements.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason=MISSING),
]

STEPS, BREAK = 16, 6


class LoRAModel(nnx.Module):
    """The recipe's model with adapters of rank 4 at one layer; Tunix trains these alone."""

    def __init__(self) -> None:
        self.model = recipe().Model(nnx.Rngs(0))
        self.model.up = nnx.LoRALinear(64, 256, lora_rank=4, rngs=nnx.Rngs(1))

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)


@functools.cache
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("tunix_gradients", TRAINERS / "tunix_gradients.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def run(made: Any, steps: int) -> list[float]:
    """Trains by Tunix's loop, which closes the trainer; returns the losses."""
    with mesh():
        made.train(recipe().batches(steps))
    return made.metrics_logger.get_metric_history("", "loss", "train").tolist()


@functools.cache
def trained(name: str, lora: bool = False) -> Any:
    """A run of one method from its first step to its last: the trainer and its losses."""
    made = recipe().trainer(name, mesh(), LoRAModel() if lora else None, max_steps=STEPS)
    return made, run(made, STEPS)


def state(made: Any) -> Any:
    return nnx.as_pure(nnx.state((made.model, made.optimizer)))


def same(one: Any, other: Any) -> None:
    """Compares all leaves of two states, bit for bit, and where they lie."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), jax.tree_util.keystr(path)


@pytest.mark.parametrize("lora", (False, True), ids=("all", "lora"))
def test_the_dense_exchange_trains_as_tunixs_own_step(lora: bool) -> None:
    (own, losses), (ours, others) = trained("tunix", lora), trained("dense", lora)
    assert len(losses) == STEPS
    np.testing.assert_allclose(others, losses, atol=1e-3)
    norms = (made.metrics_logger.get_metric_history("", "grad_norm", "train") for made in (ours, own))
    np.testing.assert_allclose(*norms, rtol=1e-2)


def test_a_step_in_int4_sends_a_seventh_of_the_bytes() -> None:
    own, dense, ours = (recipe().sent(trained(name)[0], mesh()) for name in ("tunix", "dense", "int4"))
    assert dense == own
    assert 0 < ours * 7 < own


def test_the_loss_falls() -> None:
    losses = trained("int4")[1]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("lora", (False, True), ids=("all", "lora"))
def test_a_restored_run_is_the_unbroken_one(lora: bool, tmp_path) -> None:
    """Tunix's checkpoint has what was not sent, and gives each replica its own back."""
    whole, losses = trained("int4", lora)

    def made(steps: int) -> Any:
        model = LoRAModel() if lora else None
        return recipe().trainer("int4", mesh(), model, max_steps=steps, checkpoint_root_directory=str(tmp_path))

    saved = made(BREAK)
    first = run(saved, BREAK)
    restored = made(STEPS)
    assert restored.train_steps == BREAK
    residuals = jax.tree.leaves(nnx.as_pure(restored.optimizer.opt_state[0].memory))
    assert any(np.any(np.asarray(x)) for x in residuals), "no residual was kept"
    assert all(x.sharding.spec == jax.P("data") for x in residuals)
    same(state(restored), state(saved))
    # Tunix skips the batches that it has seen.
    assert first + run(restored, STEPS) == losses
    same(state(restored), state(whole))


def test_the_train_step_is_compiled_once() -> None:
    """No state lies elsewhere after a step than before it."""
    assert trained("int4")[0].jit_train_and_eval_step()[0].func.jitted_fn._cache_size() == 1


def test_accumulation_by_tunix_is_refused() -> None:
    """It would send for every micro-batch, were its state not for one gradient alone."""
    made = recipe().trainer("int4", mesh(), max_steps=1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"gradcomp_jax.accumulate instead of optax.MultiSteps"):
        run(made, 2)


def llama(mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Tunix's own Llama 3 with two small layers, laid along the mesh as it asks, and where its parameters lie."""
    from tunix.models.llama3 import model as llama3

    sizes = {"vocab_size": 64, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
    with mesh:
        model = llama3.Llama3(
            llama3.ModelConfig(num_layers=2, rope_theta=10_000, norm_eps=1e-5, **sizes), rngs=nnx.Rngs(0)
        )
    specs = nnx.as_pure(nnx.get_partition_spec(nnx.state(model)))
    places = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    nnx.update(model, jax.device_put(nnx.as_pure(nnx.state(model)), places))
    return model, specs


def along_data(trainer: Any, mesh: jax.sharding.Mesh) -> int:
    """Bytes along this axis alone, of the train step."""
    batch = jax.device_put(next(recipe().batches(1)), jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
    with mesh:
        step = nnx.jit(trainer.create_train_step_fn()).lower(trainer.model, trainer.optimizer, batch).compile()
    return gc.wire_bytes(step, mesh=mesh).by("axis")["data",].sent


def test_tunixs_own_model_lies_along_three_axes(monkeypatch, tmp_path) -> None:
    from tunix.models.llama3 import model as llama3
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def pinned(x: jax.Array, spec: Any) -> jax.Array:
        """What Tunix does anywhere but on CPU."""
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec)))

    monkeypatch.setattr(llama3, "shard", pinned)

    def made(name: str) -> Any:
        model, specs = llama(mesh)
        folder = str(tmp_path) if name == "int4" else None
        rows = (("data", "fsdp"),)
        config = TrainingConfig(eval_every_n_steps=1000, data_sharding_axis=rows, checkpoint_root_directory=folder)
        if name == "tunix":
            trainer = PeftTrainer(model, optax.adamw(3e-3), config)
        else:
            method = recipe().METHODS[name]
            exchange = gc.model_parallel(method, axis_name="data", model_axis_name=("fsdp", "tp"), param_specs=specs)
            trainer = recipe().CompressedTrainer(model, optax.adamw(3e-3), config, exchange=exchange, mesh=mesh)
        return trainer.with_gen_model_input_fn(recipe().model_input)

    def losses(trainer: Any) -> list[float]:
        with mesh:
            trainer.train(recipe().batches(4))
        return trainer.metrics_logger.get_metric_history("", "loss", "train").tolist()

    dense, int4 = made("dense"), made("int4")
    np.testing.assert_allclose(losses(dense), losses(made("tunix")), atol=1e-3)
    losses(int4)
    same(state(made("int4")), state(int4))
    whole, narrow = (along_data(trainer, mesh) for trainer in (dense, int4))
    assert 0 < narrow * 5 < whole
