"""Under ``pmap`` ``flax.jax_utils.unreplicate`` keeps one worker's memories: where that shows, a save refuses it."""

import jax
import numpy as np
import optax
import pytest
from flax import jax_utils

import gradcomp_jax as gc

N = 8
PARAMS = {"w": np.zeros((256, 64), np.float32), "b": np.zeros(64, np.float32)}
WITH_OWNERS = (
    ("dgc", {"density": 0.05, "block": 16}),
    ("one_bit_adam", {"warm_up_steps": 2}),
    ("topk_sgd", {"density": 0.05, "block": 16, "memory_dtype": "int8"}),
)


def state_of(name: str, options: dict, workers: int = N, *, whole: bool = True):
    """Parameters and state as ``pmap`` has them: ``whole``, all of it stacked, or by ``state_axes``."""
    tx = optax.chain(getattr(gc, name)(axis_name="data", **options), optax.sgd(0.1))
    lanes = {"axis_name": "data", "axis_size": workers, "in_axes": None}
    axes = 0 if whole else gc.state_axes(jax.eval_shape(jax.vmap(tx.init, **lanes), PARAMS))
    shapes = jax.eval_shape(jax.vmap(tx.init, out_axes=axes, **lanes), PARAMS)
    state = jax.tree.map(lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape).astype(x.dtype), shapes)
    return jax.tree.map(lambda x: np.stack([x] * workers) if whole else x, PARAMS), state


def unreplicated(state):
    """What ``unreplicate`` makes of arrays on devices: what is replicated already stays."""
    return jax.tree.map(lambda x: jax_utils.unreplicate(x) if is_per_device(x) else x, state, is_leaf=is_per_device)


def is_per_device(node) -> bool:
    return isinstance(node, gc.PerDevice)


def shared_once(state):
    return jax.tree.map(lambda x: x if is_per_device(x) else x[0], state, is_leaf=is_per_device)


@pytest.mark.parametrize(("name", "options"), WITH_OWNERS, ids=[name for name, _ in WITH_OWNERS])
def test_one_worker_s_rows_of_owners_are_not_saved(name: str, options: dict, tmp_path) -> None:
    for whole in (True, False):
        state = state_of(name, options, whole=whole)
        assert any(leaf.kind == "shard" for leaf in gc.per_device.nodes_of(state, is_per_device))
        one = jax_utils.unreplicate(state) if whole else (state[0], unreplicated(state[1]))
        with pytest.raises(ValueError, match=r"one of several owners.*unreplicate.*state_axes.*else x\[0\]"):
            gc.save_checkpoint(tmp_path / f"one-{whole}", one)
        with pytest.raises(ValueError, match=r"one of several owners"):
            gc.checkpoint_metadata({"state": one})
        assert not (tmp_path / f"one-{whole}").exists()


@pytest.mark.parametrize(("name", "options"), WITH_OWNERS, ids=[name for name, _ in WITH_OWNERS])
def test_what_is_whole_is_saved(name: str, options: dict, tmp_path) -> None:
    """All workers' states, stacked as a whole or not, and that of one worker that never had another beside it."""
    states = (
        state_of(name, options),
        shared_once(state_of(name, options)),
        state_of(name, options, whole=False),
        state_of(name, options, 1, whole=False),
        shared_once(state_of(name, options, 1)),
        jax.tree.map(lambda x: x[0], state_of(name, options, 1)),
    )
    for state in states:
        assert gc.checkpoint_metadata(state)
    gc.save_checkpoint(tmp_path / "saved", states[1])
    restored = gc.restore_checkpoint(tmp_path / "saved", jax.tree.map(np.zeros_like, states[1]))
    jax.tree.map(np.testing.assert_array_equal, restored, states[1])


def test_a_checkpoint_that_is_stacked_otherwise_is_told_as_such(tmp_path) -> None:
    """It was called one of another model."""
    options = {"density": 0.05, "block": 16, "collective": "all_gather"}
    whole = state_of("topk_sgd", options)
    gc.save_checkpoint(tmp_path / "one", jax.tree.map(lambda x: x[0], whole))
    with pytest.raises(ValueError, match=r"stacked as a whole.*the checkpoint is not.*one worker's memories alone"):
        gc.restore_checkpoint(tmp_path / "one", whole)
    gc.save_checkpoint(tmp_path / "whole", whole)
    for like in (shared_once(whole), state_of("topk_sgd", options, whole=False)):
        with pytest.raises(ValueError, match=r"checkpoint is of a state that is stacked as a whole.*stacked likewise"):
            gc.restore_checkpoint(tmp_path / "whole", like)
    jax.tree.map(np.testing.assert_array_equal, gc.restore_checkpoint(tmp_path / "whole", whole), whole)
