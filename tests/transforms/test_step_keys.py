"""Keys of many leaves at once are those of each leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax._checks import typed_key
from gradcomp_jax.core.step_keys import StepKeys


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_leaves_are_those_of_each_leaf(implementation: str) -> None:
    numbers = [0, 3, 160, 2**31 - 1]

    def keys(step: jax.Array, worker: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        of = StepKeys.of(jax.random.key(7, impl=implementation), step, worker, None)
        together, one_by_one = of.of_leaves(of.own, numbers), [of.of_leaf(of.own, n) for n in numbers]
        return [jax.random.key_data(k) for k in together], [jax.random.key_data(k) for k in one_by_one]

    together, one_by_one = jax.jit(keys)(jnp.int32(9), jnp.int32(3))
    np.testing.assert_array_equal(np.stack(together), np.stack(one_by_one))


def test_a_raw_key_is_the_typed_one() -> None:
    for given in (
        7,
        np.int64(7),
        jnp.uint32(7),
        jax.random.key(7),
        jax.random.PRNGKey(7),
        np.asarray(jax.random.PRNGKey(7)),
    ):
        assert jax.random.key_data(typed_key("key", given)).tolist() == [0, 7]
    for wrong in (1.5, np.zeros(2, np.int32), jnp.zeros((2, 2), jnp.uint32)):
        with pytest.raises(TypeError, match=r"rngs must be a seed or a key, such as jax.random.key\(0\), got"):
            typed_key("rngs", wrong)
