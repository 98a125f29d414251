"""A loss scale is always a number that a loss can be multiplied by, whatever it was and however long it grew."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.transforms import LossScaleState, SkipWatch

DTYPES = (jnp.float16, jnp.bfloat16)


def scaled(**options: Any) -> optax.GradientTransformationExtraArgs:
    return gc.dynamic_loss_scale(optax.chain(gc.dense(axis_name=None), optax.sgd(0.25)), **options)


def run(tx: Any, state: Any, dtype: Any, steps: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """The state after some steps on gradients of 1/4, all scales that were used, and the first update entry of each."""

    def step(state: Any, _: Any) -> Any:
        gradient = {"w": jnp.broadcast_to(state.scale / 4, (3,)).astype(dtype)}
        moved, new = tx.update(gradient, state)
        return new, (state.scale, moved["w"][0].astype(jnp.float32))

    state, (scales, moved) = jax.jit(lambda s: jax.lax.scan(step, s, None, length=steps))(state)
    return state, np.asarray(scales), np.asarray(moved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_grows_to_its_bound_and_training_goes_on(dtype: Any) -> None:
    tx = scaled(growth_interval=1)
    _, scales, moved = run(tx, tx.init({"w": np.zeros(3, dtype)}), dtype, 400)
    assert np.isfinite(scales).all() and scales.max() <= 2.0**24
    # In float16 every other step overflows, because with this interval each good one makes the scale larger.
    assert (moved[-100:] != 0).sum() >= 50
    if dtype != jnp.float16:
        assert scales[-1] == 2.0**24 and (moved == -1 / 16).all()


@pytest.mark.parametrize("spoilt", (np.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.nan, -4.0))))
def test_a_state_without_a_scale_costs_one_step(spoilt: float) -> None:
    tx = scaled(initial=512.0)
    state = tx.init({"w": np.zeros(3, np.float32)})._replace(scale=np.float32(spoilt))
    state, scales, moved = run(tx, state, jnp.float32, 3)
    np.testing.assert_array_equal(scales[1:], 512)
    np.testing.assert_array_equal(moved, [0, -1 / 16, -1 / 16])
    # Nor is a step taken where the loss was multiplied by another number.
    state = tx.init({"w": np.zeros(3, np.float32)})._replace(scale=np.float32(spoilt))
    moved, after = jax.jit(tx.update)({"w": np.ones(3, np.float32)}, state)
    assert not np.asarray(moved["w"]).any() and after.scale == 512


@pytest.mark.slow
def test_a_lasting_overflow_leaves_a_scale_to_come_back_with() -> None:
    tx = scaled(initial=8.0, minimum=2.0, growth_interval=2)
    state, update = tx.init({"w": np.zeros(3, np.float32)}), jax.jit(tx.update)
    for _ in range(5):
        _, state = update({"w": np.full(3, np.inf, np.float32)}, state)
    assert state.scale == 2
    for _ in range(2):
        _, state = update({"w": np.ones(3, np.float32)}, state)
    assert state.scale == 4
    # A scale that begins below the least one does not rise with an overflow.
    tx = scaled(initial=0.5)
    assert (
        jax.jit(tx.update)({"w": np.full(3, np.inf, np.float32)}, tx.init({"w": np.zeros(3, np.float32)}))[1].scale
        == 0.5
    )


def test_the_count_of_good_steps_ends_nowhere() -> None:
    tx = scaled(growth_interval=2**40, initial=4.0)
    state = tx.init({"w": np.zeros(3, np.float32)})._replace(good_steps=np.int32(2**31 - 3))
    _, scales, moved = run(tx, state, jnp.float32, 4)
    assert moved.all() and (scales >= 4).all()


@pytest.mark.parametrize(
    "options", ({"initial": np.inf}, {"initial": 1e39}, {"minimum": 1e-60}, {"maximum": np.inf}, {"factor": 1 + 1e-12})
)
def test_a_number_that_float32_does_not_have_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="float32"):
        scaled(**options)
    with pytest.raises(ValueError, match="minimum must be at most maximum"):
        scaled(minimum=8.0, maximum=4.0)


@pytest.mark.slow
def test_reset_nonfinite_mends_the_scale_too() -> None:
    tx = scaled()
    state = tx.init({"w": np.zeros(3, np.float32)})
    for spoilt in (np.inf, np.nan, 0.0):
        mended, count = gc.reset_nonfinite({"opt_state": state._replace(scale=np.float32(spoilt))})
        assert count == 1 and mended["opt_state"].scale == state.scale
    same, count = gc.reset_nonfinite(state)
    assert count == 0 and isinstance(same, LossScaleState) and same.scale is state.scale


def test_the_warning_tells_the_scale_from_the_gradient() -> None:
    falls, stays = SkipWatch(in_a_row=3), SkipWatch(in_a_row=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in range(3):
            falls(np.float32(count), np.float32(2.0 ** (20 - count)))
            stays(np.float32(count), np.float32(1))
    with pytest.warns(UserWarning, match="scale falls with each .* 131072 now.* lower initial="):
        falls(np.float32(3), np.float32(2.0**17))
    with pytest.warns(UserWarning, match="not the loss scale, which is 1 .* Look for a NaN"):
        stays(np.float32(3), np.float32(1))


@pytest.mark.slow
def test_a_train_step_shows_the_scale_and_hands_it_to_the_watch() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    tx = gc.dynamic_loss_scale(
        optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1)), initial=2.0**40, factor=2.0, growth_interval=1
    )
    state = gc.init_state({"w": np.ones(3, np.float32)}, tx, mesh)
    step = gc.make_train_step(lambda p, x: (p["w"] * x).sum() * jnp.inf, tx, mesh)
    with pytest.warns(UserWarning, match="The loss scale falls with each of them"):
        for i in range(40):
            state, metrics = step(state, np.ones((1, 3), np.float32))
            assert metrics["loss_scale"] == 2.0 ** (39 - i)
