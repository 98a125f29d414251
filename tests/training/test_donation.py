"""A state is donated: no buffer of it is given away twice, or given away and read, which would end the process."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp_jax.training.donation import OwnBuffers
from tests.training import problem
from tests.xla_flags import xla_flags

SETTING = """
import jax, jax.numpy as jnp, numpy as np, optax, gradcomp_jax as gc
from gradcomp_jax.training.simulated import make_simulated_step, simulated_state
from tests.training.problem import mesh_of

mesh = mesh_of(8)
params = {"a": np.eye(16, dtype=np.float32), "b": np.eye(16, dtype=np.float32), "c": np.zeros(16, np.float32)}
tx = optax.chain(gc.terngrad(axis_name="data"), optax.sgd(0.1, momentum=0.9))
rows = np.ones((16, 16), np.float32)

def loss(p, batch):
    return jnp.mean((batch @ p["a"] @ p["b"] + p["c"]) ** 2)

def fresh():
    return gc.init_state(params, tx, mesh)

def replaced(state, **parts):
    return state._replace(params=dict(state.params) | parts)

def of_the_same_shards(array, but=()):
    shards = [jax.device_put(np.asarray(s.data), s.device) if i in but else s.data
              for i, s in enumerate(array.addressable_shards)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

def end(step, state, batch=rows, again=None):
    for _ in range(3):
        state, metrics = step(state, batch)
        state = again(state) if again else state
    assert np.isfinite(np.asarray(metrics["loss"])).all()
    return state
"""

TRAIN_STEP = """
step, state = gc.make_train_step(loss, tx, mesh), fresh()
tied = end(step, replaced(state, b=state.params["a"]))
apart = fresh()
apart = end(step, replaced(apart, b=apart.params["a"].copy()))
for one, other in zip(jax.tree.leaves(tied), jax.tree.leaves(apart), strict=True):
    np.testing.assert_array_equal(one, other)
end(step, tied, again=lambda s: replaced(s, b=s.params["a"]))
state = fresh()
end(step, replaced(state, b=of_the_same_shards(state.params["a"])))
state = fresh()
end(step, replaced(state, b=of_the_same_shards(state.params["a"], but=(0, 1, 2, 3, 4, 5, 6))))
zeros = jnp.zeros((16, 16))
end(step, replaced(fresh(), a=zeros, b=zeros))
state = fresh()
trace = lambda s, a: jax.tree.map(lambda x: a if x.shape == (16, 16) else x, s)
end(step, state._replace(opt_state=(state.opt_state[0], trace(state.opt_state[1], state.params["a"]))))
state = fresh()
batch = state.params["a"]
end(step, state, batch)
state = fresh()
end(step, state, of_the_same_shards(state.params["b"]))
"""

OTHER_STEPS = """
shared = simulated_state(params, tx, 4)
end(make_simulated_step(loss, tx, 4), replaced(shared, b=shared.params["a"]))

late = gc.make_overlapped_step(loss, gc.dense(axis_name="data"), optax.sgd(0.1), mesh, delay=1)
state = gc.init_state(params, late.tx, mesh, replicas=True)
end(late, replaced(state, b=state.params["a"]), again=lambda s: replaced(s, b=s.params["a"]))
late.wait()
"""


@pytest.mark.parametrize(
    "steps", [TRAIN_STEP, pytest.param(OTHER_STEPS, marks=pytest.mark.slow)], ids=["train", "others"]
)
def test_a_step_that_donates_takes_a_state_whose_arrays_share_buffers(steps: str) -> None:
    # A command that ran in this process may have left flags for fewer devices.
    environment = os.environ | {"XLA_FLAGS": xla_flags(8)}
    ended = subprocess.run([sys.executable, "-c", SETTING + steps], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]


def placed(values: np.ndarray) -> jax.Array:
    return jax.device_put(values, NamedSharding(problem.mesh_of(8), P()))


def buffers_of(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def test_only_what_shares_a_buffer_is_copied_and_keeps_its_values() -> None:
    a, key = placed(np.arange(3.0)), jax.random.key(1)
    state = {"one": a, "other": a, "apart": placed(np.arange(3.0)) + 1, "key": key, "later": key, "number": 3}
    own = OwnBuffers().of(state)
    assert own["one"] is a and own["apart"] is state["apart"] and own["key"] is key and own["number"] == 3
    assert not buffers_of(own["other"]) & buffers_of(a) and own["other"].sharding == a.sharding
    np.testing.assert_array_equal(own["other"], a)
    assert own["later"].dtype == key.dtype and not buffers_of(own["later"]) & buffers_of(key)


@pytest.mark.parametrize("of_a_key", [False, True])
def test_what_the_batch_reads_stays_the_batchs(of_a_key: bool) -> None:
    a, own = jax.random.key(1) if of_a_key else placed(np.arange(3.0)), OwnBuffers()
    state = [a, placed(np.ones(3)) + 1]
    own.returned(state)
    assert own.of(state, [placed(np.ones(3)) + 2, 3.0]) is state
    read = jax.random.key_data(a) if of_a_key else a
    assert not buffers_of(own.of(state, [read])[0]) & buffers_of(read)


def test_what_the_last_step_returned_is_not_compared_again(monkeypatch) -> None:
    own, state = OwnBuffers(), [jnp.zeros(3), jnp.ones(3)]
    own.returned(state)
    monkeypatch.setattr("gradcomp_jax.training.donation._buffers", None)
    assert own.of(state) is state
    with pytest.raises(TypeError):
        own.of([state[1], state[1]])


def test_any_array_that_a_step_has_taken_is_found() -> None:
    own, state = OwnBuffers(), {"a": placed(np.arange(3.0)), "b": placed(np.arange(3.0)), "n": 1}
    state["b"].delete()
    for known in (False, True):
        if known:
            own.returned({name: state[name] for name in "ab"})
            del state["n"]
        with pytest.raises(ValueError, match=r"'b' of this state was donated to an earlier step.*donate=False"):
            own.of(state)
    with pytest.raises(ValueError, match="this batch was donated to an earlier step"):
        own.of([jnp.zeros(3)], state["b"])
    shards = [shard.data for shard in state["a"].addressable_shards]
    again = jax.make_array_from_single_device_arrays((3,), state["a"].sharding, shards)
    shards[5].delete()
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        own.of([again])
