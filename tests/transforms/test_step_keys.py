"""Keys of many leaves at once are those of each leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax.transforms.step_keys import StepKeys


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_leaves_are_those_of_each_leaf(implementation: str) -> None:
    numbers = [0, 3, 160, 2**31 - 1]

    def keys(step: jax.Array, worker: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        of = StepKeys.of(jax.random.key(7, impl=implementation), step, worker, None)
        together, one_by_one = of.of_leaves(of.own, numbers), [of.of_leaf(of.own, n) for n in numbers]
        return [jax.random.key_data(k) for k in together], [jax.random.key_data(k) for k in one_by_one]

    together, one_by_one = jax.jit(keys)(jnp.int32(9), jnp.int32(3))
    np.testing.assert_array_equal(np.stack(together), np.stack(one_by_one))
