"""Recipes: each builds, and has the settings in their places."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcomp_jax import per_device
from gradcomp_jax._errors import SettingError, UnknownNameError
from gradcomp_jax.experiments import recipes
from gradcomp_jax.experiments.registered import optimizer
from gradcomp_jax.experiments.settings import Settings
from gradcomp_jax.experiments.tasks import TASKS
from tests.conformance.environments import AXIS

SETTINGS = Settings(epochs=6, batch_per_worker=16, learning_rate=0.02, density=0.001, clip_norm=8.0, warm_up_epochs=0.5)
STEPS = 468


@pytest.mark.parametrize("method", recipes.RECIPES)
@pytest.mark.parametrize("dataset", TASKS)
def test_every_method_builds_before_both_optimizers(method, dataset):
    """Settings of tasks differ otherwise in numbers alone, which methods check where they are made."""
    settings = TASKS[dataset].settings
    if method == "sparse-adamw" and settings.optimizer == "sgd":
        with pytest.raises(SettingError, match=r"sparse-adamw: AdamW is a part of it.*: take .* --task language-model"):
            recipes.build(method, settings, STEPS)
        return
    assert isinstance(recipes.build(method, settings, STEPS), optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize(
    ("method", "is_kept"),
    [
        ("dense-bf16", True),
        ("terngrad", True),
        ("block-quantized-4-bit", True),
        ("delayed-average", True),
        ("diloco", True),
        ("dgc", False),
        ("topk-sgd", False),
        ("powersgd", False),
        ("delayed-dgc", False),
        ("sparse-adamw", False),
    ],
)
def test_adamw_keeps_a_first_moment_where_the_method_has_none(method: str, is_kept: bool) -> None:
    tx = recipes.build(method, dataclasses.replace(TASKS["language-model"].settings, axis_name=AXIS), STEPS)
    params = {"w": jnp.zeros((2, 64, 32) if recipes.RECIPES[method].replicas else (64, 32))}
    in_axes = 0 if recipes.RECIPES[method].replicas else None
    state = jax.eval_shape(jax.vmap(tx.init, in_axes, axis_name=AXIS, axis_size=2), params)
    (found,) = per_device.nodes_of(state, lambda node: hasattr(node, "nu"))
    assert hasattr(found, "mu") == is_kept


def test_unknown_method_lists_the_names_and_suggests_one():
    with pytest.raises(UnknownNameError, match="did you mean 'terngrad'") as caught:
        recipes.build("ternagrad", SETTINGS, STEPS)
    assert all(name in str(caught.value) for name in recipes.RECIPES)


def test_a_refusal_of_the_method_is_a_setting_error(monkeypatch):
    def refuse(**options):
        raise ValueError("does not fit")

    monkeypatch.setattr(recipes, "terngrad", refuse)
    with pytest.raises(SettingError, match="terngrad: does not fit"):
        recipes.build("terngrad", SETTINGS, STEPS)


def dgc_options(monkeypatch, method):
    """The options with which a recipe calls dgc."""
    seen = []

    def record(**options):
        seen.append(options)
        return optax.GradientTransformationExtraArgs(*optax.identity())

    monkeypatch.setattr(recipes, "dgc", record)
    recipes.build(method, SETTINGS, STEPS)
    (options,) = seen
    return options


def test_dgc_has_the_settings_of_the_task(monkeypatch):
    options = dgc_options(monkeypatch, "dgc")
    for name in ("clip_norm", "momentum", "density"):
        assert options[name] == getattr(SETTINGS, name)


def test_warm_up_falls_to_the_final_density():
    stages = recipes.warm_up_stages(SETTINGS, STEPS)
    densities = [density for _, density in stages]
    assert densities == sorted(densities, reverse=True)
    assert min(densities) > SETTINGS.density
    assert sum(steps for steps, _ in stages) == round(SETTINGS.warm_up_epochs * STEPS)


def test_warm_up_leaves_out_what_is_not_above_the_final_density():
    settings = dataclasses.replace(SETTINGS, density=0.0625)
    assert [density for _, density in recipes.warm_up_stages(settings, STEPS)] == [0.25]
    assert recipes.warm_up_stages(dataclasses.replace(SETTINGS, density=0.5), STEPS) == ()
    assert recipes.warm_up_stages(dataclasses.replace(SETTINGS, warm_up_epochs=0), STEPS) == ()


def test_the_seed_is_in_the_state_and_not_in_the_program():
    params = {"w": jnp.ones((32, 64))}

    def build(seed):
        return recipes.build("terngrad", dataclasses.replace(SETTINGS, axis_name="x"), STEPS, seed=seed)

    def program(tx):
        def update(updates, state):
            return tx.update(updates, state)[0]

        return str(jax.make_jaxpr(update, axis_env=[("x", 2)])(params, build(0).init(params)))

    first, second = build(1).init(params), build(2).init(params)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    assert sum(not np.array_equal(a, b) for a, b in leaves) == 1
    assert program(build(1)) == program(build(2))


@pytest.mark.standard_promotion  # What Muon and Adam in optax need.
@pytest.mark.parametrize(
    ("method", "optimizer"), [("dense", "sgd"), ("dense", "adamw"), ("sign-sgd", "sgd"), ("muloco", "sgd")]
)
def test_a_linear_schedule_takes_every_step_s_length_to_zero(method, optimizer):
    """In every place where a recipe has its learning rate: its optimizer, one of its own, or that of replicas."""
    steps = 4
    params = {"w": jnp.arange(32.0).reshape(4, 8) - 9}
    # Replicas do not exchange in so few steps.
    same = dataclasses.replace(SETTINGS, workers=1, epochs=2, every=9, optimizer=optimizer, axis_name="x")

    def lengths(schedule):
        tx = recipes.build(method, dataclasses.replace(same, schedule=schedule), steps // 2)

        def run(gradient):
            def step(state, _):
                updates, state = tx.update(gradient, state, params)
                return state, updates["w"]

            return jax.lax.scan(step, tx.init(params), length=steps)[1]

        one_worker = jax.tree.map(lambda leaf: leaf[None], params)
        return np.asarray(jax.jit(jax.vmap(run, axis_name="x"))(one_worker))[0]

    falling = np.array([1, 0.75, 0.5, 0.25])[:, None, None]
    np.testing.assert_allclose(lengths("linear"), falling * lengths("constant"), rtol=1e-5)


@pytest.mark.parametrize(("momentum", "traces"), [(0.9, 1), (0.0, 0)])
def test_sgd_without_momentum_keeps_no_trace(momentum: float, traces: int) -> None:
    """DGC has its momentum inside: a trace after it would be a dense copy for nothing, and look like a second momentum."""
    state = optimizer(dataclasses.replace(SETTINGS, momentum=momentum)).init({"w": jnp.zeros(3)})
    assert sum(isinstance(node, optax.TraceState) for node in state) == traces
