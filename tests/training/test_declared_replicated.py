"""Per-device state that a shard_map declares replicated: refused where it would be lost, and where it can be seen before."""

import dataclasses
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import mesh_of

GRADIENT = {"w": np.linspace(-1, 1, 96, dtype=np.float32).reshape(12, 8)}


def topk():
    return gc.topk_sgd(axis_name="data", density=0.25, block=16, collective="all_gather")


def updated(mesh, *, specs, check_vma: bool):
    """The state after one update of gradients that differ by worker, and whose residuals do."""
    tx = topk()
    axes = {"mesh": mesh, "axis_names": {"data"}}
    start = jax.shard_map(lambda _: tx.init(GRADIENT), in_specs=P("data"), out_specs=specs, check_vma=False, **axes)

    def update(scale, state):
        own = jax.tree.map(lambda g: g * scale, GRADIENT)
        return tx.update(own, state)[1]

    step = jax.shard_map(update, in_specs=(P("data"), specs), out_specs=specs, check_vma=check_vma, **axes)
    scales = 1 + np.arange(mesh.shape["data"], dtype=np.float32)[:, None]
    return jax.jit(step)(scales, jax.jit(start)(scales))


def right_specs():
    shapes = jax.eval_shape(jax.vmap(lambda _: topk().init(GRADIENT), axis_name="data"), np.zeros(8))
    return gc.state_specs(shapes, axis_name="data")


def with_model_axis(workers: int):
    return jax.make_mesh((workers, 8 // workers), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_a_save_would_lose_it_and_refuses(tmp_path) -> None:
    lies = updated(mesh_of(8), specs=P(), check_vma=False)
    value = lies.memory[0][0].value
    assert value.is_fully_replicated
    assert len({np.asarray(shard.data).tobytes() for shard in value.addressable_shards}) == 8
    with pytest.raises(
        ValueError, match=r"memory/0/0' is another on every device.*all but one.*gradcomp_jax.state_specs"
    ):
        gc.save_checkpoint(tmp_path / "saved", {"params": GRADIENT, "opt_state": lies})
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        (lambda: mesh_of(8), right_specs),
        # One worker of eight devices, which do hold copies, and two of four.
        (lambda: with_model_axis(1), P),
        (lambda: with_model_axis(2), right_specs),
    ],
    ids=["its own specs", "one worker", "a model axis"],
)
def test_what_is_whole_is_saved(mesh, specs, tmp_path) -> None:
    state = updated(mesh(), specs=specs(), check_vma=False)
    gc.save_checkpoint(tmp_path / "saved", state)
    restored = gc.restore_checkpoint(tmp_path / "saved", state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert np.any(state.memory[0][0].value)


def test_state_on_one_device_and_on_the_host_is_saved(tmp_path) -> None:
    """As vmap holds it, and as resize_workers returns it."""
    tx = topk()
    state = jax.jit(jax.vmap(lambda _: tx.init(GRADIENT), axis_name="data"))(np.zeros(3))
    gc.save_checkpoint(tmp_path / "vmap", state)
    gc.save_checkpoint(tmp_path / "host", jax.tree.map(np.asarray, state))


def test_copies_of_a_replica_are_one_value(tmp_path) -> None:
    """What all workers have in common may be declared so; one that differs may not, whatever its kind."""
    mesh = mesh_of(4)
    rows = jax.device_put(np.arange(12, dtype=np.float32).reshape(4, 3), NamedSharding(mesh, P()))
    node = gc.PerDevice(rows, 4, "replica")
    gc.save_checkpoint(tmp_path / "equal", {"state": node})
    shards = [jax.device_put(np.asarray(rows) + (i == 2), device) for i, device in enumerate(mesh.devices)]
    other = jax.make_array_from_single_device_arrays((4, 3), rows.sharding, shards)
    with pytest.raises(ValueError, match="'state' is another on every device"):
        gc.save_checkpoint(tmp_path / "differ", {"state": dataclasses.replace(node, value=other)})


def test_an_update_says_so_where_it_can_see() -> None:
    with pytest.raises(
        ValueError, match=r"state is declared replicated over 'data', and each.*gradcomp_jax.state_specs.*not P\(\)"
    ):
        updated(mesh_of(8), specs=P(), check_vma=True)


def test_an_update_takes_its_own_specs() -> None:
    assert np.any(updated(with_model_axis(2), specs=right_specs(), check_vma=True).memory[0][0].value)


PROCESS = """
import sys, jax, numpy as np, gradcomp_jax as gc
from jax.sharding import NamedSharding, PartitionSpec as P
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
place = NamedSharding(jax.make_mesh((2,), ("data",)), P())
for differs in (0, 1):
    own = jax.device_put(np.full((3, 4), differs * jax.process_index(), np.float32), jax.local_devices()[0])
    value = jax.make_array_from_single_device_arrays((3, 4), place, [own])
    try:
        gc.save_checkpoint(sys.argv[3] + str(differs), {"state": gc.PerDevice(value, 3)})
        print("saved", flush=True)
    except ValueError as error:
        print(error, flush=True)
"""


@pytest.mark.slow
def test_two_processes_with_one_device_each_compare(tmp_path) -> None:
    """Neither sees the other's copy."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        run = [sys.executable, "-c", PROCESS, f"localhost:{probe.getsockname()[1]}"]
    both = [
        subprocess.Popen([*run, str(i), str(tmp_path / "saved")], stdout=subprocess.PIPE, text=True, env=env)
        for i in range(2)
    ]
    for process in both:
        said = process.communicate(timeout=120)[0]
        assert "saved\n'state' is another on every device" in said
    assert (tmp_path / "saved0").is_dir() and not (tmp_path / "saved1").exists()
