"""The running sum of an exchange's means: exact for every dtype of gradient, however many steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import owners_of_leaf, vmapped

N, AXIS, STEPS = 4, "data", 300
SHAPES = {"kernel": (16, 40), "bias": (7,)}


def mapped(tx, params):
    return vmapped(tx, params, N)


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "dtype"), [("all_gather", jnp.float16), ("two_phase", jnp.bfloat16)])
def test_the_sum_is_the_mean_of_the_estimates_after_many_steps(collective: str, dtype) -> None:
    """Rounded to 16 bits in each step, the sum would be off by tens of percent."""
    params = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    state, update = mapped(gc.ef21(axis_name=AXIS, density=0.1, block=64, collective=collective), params)

    def step(state, key):
        keys = dict(zip(SHAPES, jax.random.split(key), strict=True))
        drawn = {name: jax.random.normal(keys[name], (N, *SHAPES[name])).astype(dtype) for name in SHAPES}
        updates, state = update(drawn, state)
        return state, updates

    state, updates = jax.jit(lambda s: jax.lax.scan(step, s, jax.random.split(jax.random.key(0), STEPS)))(state)
    last = {name: np.asarray(u[-1, 0].astype(jnp.float32)) for name, u in updates.items()}
    (kernels,), (biases,) = state.inner.memory
    estimates = {"kernel": kernels, "bias": biases}
    for name, shape in SHAPES.items():
        assert updates[name].dtype == dtype
        size = int(np.prod(shape))
        mean = np.asarray(estimates[name].value, np.float64).reshape(N, -1)[:, :size].mean(axis=0).reshape(shape)
        if name == "kernel" and collective == "two_phase":
            # What owners have not passed on yet.
            mean -= owners_of_leaf(state.inner.server[0], size, N, dealt=True).reshape(shape)
        total = np.asarray(state.total[name])
        total = total[0] if total.ndim > len(shape) else total
        largest = np.abs(mean).max()
        # Float32's rounding of each of the steps, at most, in the sum; the dtype's once, in the update.
        np.testing.assert_allclose(total, mean, atol=STEPS * 2**-24 * largest)
        once = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(last[name], mean, atol=(once + STEPS * 2**-24) * largest)
