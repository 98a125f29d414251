"""What a GPU is asked, at the size of a test."""

import jax
import jax.numpy as jnp

from benchmarks import device


def test_an_update_runs_again_with_its_state_donated() -> None:
    round, launches = device.start("dgc", {"kernel": jax.ShapeDtypeStruct((64, 128), jnp.float32)})
    first, second = (jax.device_get(round.step()) for _ in range(2))
    assert launches > 0
    # The second step has what the first kept.
    assert jnp.abs(first["kernel"] - second["kernel"]).max() > 0
