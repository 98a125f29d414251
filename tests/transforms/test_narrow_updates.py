"""What a float16 update cannot carry stays in the memory: sent and kept are everything that was seen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gradcomp_jax as gc
from tests.conformance.environments import AXIS, vmapped

N, MOST = 2, 65504.0
CODES = {
    "topk": gc.compressors.topk(1 / 64, block=64, dtype=jnp.float32),
    "random_k": gc.compressors.random_k(1 / 64, block=64, dtype=jnp.float32),
}
PARAMS = {"half": np.zeros((8, 24), np.float16), "whole": np.zeros((5, 13), np.float32)}


def constant() -> Any:
    return {name: np.full((N, *p.shape), 30_000, p.dtype) for name, p in PARAMS.items()}


def summed(tree: Any) -> float:
    return sum(np.asarray(leaf, np.float64).sum() for leaf in jax.tree.leaves(tree))


def trained(tx: Any, steps: int = 60) -> tuple[list[Any], Any]:
    """The updates of all steps, and the last state."""
    state, update = vmapped(tx, PARAMS, N)
    seen = []
    for _ in range(steps):
        updates, state = update(constant(), state, PARAMS)
        seen.append(jax.tree.map(lambda u: np.asarray(u, np.float64)[0], updates))
    return seen, state


@pytest.mark.parametrize(
    ("code", "collective", "view"),
    [
        ("topk", "all_gather", "tree"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("topk", gc.collectives.TwoPhase("server"), "dealt"),
                ("topk", gc.collectives.TwoPhase("put_back"), "rows"),
                ("random_k", "all_reduce", "rows"),
            )
        ),
    ],
)
def test_sent_and_kept_are_all_that_was_seen(code: str, collective: Any, view: Any) -> None:
    tx = gc.exchange(CODES[code], axis_name=AXIS, collective=collective, view=view, mask=True)
    seen, state = trained(tx)
    assert int(state.skipped[0] if np.ndim(state.skipped) else state.skipped) == 0
    assert all(np.isfinite(u).all() for step in seen for u in step.values())
    largest = max(np.abs(step["half"]).max() for step in seen)
    assert largest == MOST, "nothing was cut off"
    sent = sum(u.sum() for step in seen for u in step.values())
    kept = summed(state.memory) / N + summed(state.server)
    total = 30_000.0 * len(seen) * sum(p.size for p in PARAMS.values())
    # The cast of what is within the range rounds, and that is in no memory.
    np.testing.assert_allclose(sent + kept, total, rtol=2.0**-11)


@pytest.mark.slow
def test_with_momentum() -> None:
    memory = gc.memory.momentum_correction(0.9)
    seen, state = trained(gc.exchange(CODES["topk"], axis_name=AXIS, memory=memory, mask=True), 100)
    assert all(np.isfinite(u).all() for step in seen for u in step.values())
    assert max(np.abs(step["half"]).max() for step in seen) == MOST
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_scaled_memory_is_traced_where_what_differs_by_worker_is_tracked() -> None:
    """The part beyond float16's range is read from the common mean in the pass that waits for this worker's own scales."""
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    params = {"half": jax.ShapeDtypeStruct((64, 64), jnp.float16)}
    lowered = gc.lower_update(params, gc.dgc(axis_name=AXIS, memory_dtype="int8"), mesh, axis_name=AXIS)
    assert "xi8>" in lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("view", ("dealt",))
def test_the_owner_of_a_shard_takes_it_back_for_all(view: Any) -> None:
    mesh = jax.make_mesh((N,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:N])
    specs = {"w": PartitionSpec(AXIS)}
    tx = gc.exchange(
        CODES["topk"], axis_name=AXIS, collective=gc.collectives.ReduceScatter(specs), view=view, mask=True
    )
    params = {"w": np.zeros((10, 25), np.float16)}
    state = gc.init_state(params, tx, mesh, axis_name=AXIS, param_specs=specs).opt_state
    marks = gc.state_specs(state, axis_name=AXIS)

    @jax.jit
    def update(gradient: Any, state: Any, params: Any) -> Any:
        def local(gradient: Any, state: Any, params: Any) -> Any:
            return tx.update(jax.tree.map(lambda g: g[0], gradient), state, params)

        places = (PartitionSpec(AXIS), marks, specs)
        return jax.shard_map(local, mesh=mesh, in_specs=places, out_specs=(specs, marks))(gradient, state, params)

    gradient = {"w": np.full((N, 10, 25), 30_000, np.float16)}
    gradient = jax.device_put(gradient, NamedSharding(mesh, PartitionSpec(AXIS)))
    sent, largest = 0.0, 0.0
    for _ in range(12):
        updates, state = update(gradient, state, params)
        value = np.asarray(updates["w"], np.float64)
        sent, largest = sent + value, max(largest, np.abs(value).max())
    kept = summed(state.memory) / N
    assert largest == MOST
    np.testing.assert_allclose(sent.sum() + kept, 12 * 30_000 * 250, rtol=2.0**-11)
