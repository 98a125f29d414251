"""What waits is unchanged, whatever it waits for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp_jax.collectives import wait


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "float32", "int8"])
def test_waiting_changes_no_bit(dtype: str) -> None:
    rng = np.random.default_rng(0)
    words = [rng.integers(0, 256, 64, dtype=np.uint8).view(dtype) for _ in range(3)]
    after = [np.float32([np.nan]), np.uint8([255]), np.int32([-1]), np.zeros(0, np.uint16)]
    arrays = [*words, np.zeros((0,), dtype), words[0].reshape(2, -1)]
    for got, want in zip(jax.jit(wait)(arrays, after), arrays, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_every_array_depends_on_what_it_waits_for() -> None:
    """In the compiled program: no simplification has seen that the condition always holds."""
    compiled = jax.jit(lambda a, b: wait([a * 2], [b])[0]).lower(jnp.ones((8,)), jnp.ones((4,))).compile()
    assert "popcnt" in compiled.as_text()
