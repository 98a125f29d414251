"""Workers begin equal or are refused: devices of one process, and processes."""

import functools
import os
import pathlib
import re
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from gradcomp_jax._errors import SettingError
from tests.distributed.test_verifier import copies
from tests.network.processes import PATIENCE_S, environment, free_port, started, wait

FLAT, RAMP = np.ones(16, np.float32), np.linspace(0, 1, 16, dtype=np.float32)


@pytest.mark.slow
def test_equal_workers_start(mesh8) -> None:
    gc.check_equal_start(copies(mesh8, FLAT, RAMP), mesh8)
    gc.check_equal_start({}, mesh8)
    gc.check_equal_start({"host": FLAT, "number": 3.0}, mesh8)


def test_the_first_array_that_differs_is_named(mesh8) -> None:
    with pytest.raises(
        SettingError, match=r"equal: \['1'\] is not on worker 5 what it is on worker 0: make them the same"
    ):
        gc.check_equal_start(copies(mesh8, FLAT, RAMP, faulty=5), mesh8)
    both = {"a": copies(mesh8, FLAT, RAMP, faulty=0), "b": copies(mesh8, RAMP, faulty=2)}
    found = r"\['a'\]\['1'\] is not on workers 1 to 7 what it is on worker 0, and so are 1 more"
    with pytest.raises(SettingError, match=found):
        gc.check_equal_start(both, mesh8)


@pytest.mark.slow
def test_replicas_start_equal_and_what_is_a_workers_own_may_differ(mesh8) -> None:
    tx = optax.chain(
        optax.sgd(0.1), gc.local_sgd(gc.topk_sgd(axis_name="data", density=0.5), axis_name="data", every=2)
    )
    state = gc.init_state({"w": np.ones((4, 8), np.float32)}, tx, mesh8, replicas=True)
    gc.check_equal_start(state, mesh8)

    def moved(node):
        # The second worker's part: its replica, and what its exchange keeps.
        if not isinstance(node, gc.PerDevice) or node.value.dtype != np.float32:
            return node
        rows = np.array(node.value)
        rows[len(rows) // 8 : len(rows) // 4] += 1
        return jax.tree.map(lambda _: jax.device_put(rows, node.value.sharding), node)

    apart = jax.tree.map(moved, state, is_leaf=lambda node: isinstance(node, gc.PerDevice))
    gc.check_equal_start(apart.opt_state, mesh8)
    with pytest.raises(SettingError, match=r"params\['w'\] is not on worker 1 what"):
        gc.check_equal_start(apart, mesh8)


@pytest.mark.slow
def test_along_other_axes_each_worker_is_compared_with_its_own_parts() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    place = jax.NamedSharding(mesh, P(None, "model"))

    def laid(faulty):
        parts = []
        for device, index in place.devices_indices_map(whole.shape).items():
            part = whole[index].copy()
            part[3, 1] += device.id == faulty
            parts.append(jax.device_put(part, device))
        return {"w": jax.make_array_from_single_device_arrays(whole.shape, place, parts)}

    check = functools.partial(gc.check_equal_start, mesh=mesh, param_specs={"w": P(None, "model")})
    check(laid(None))
    with pytest.raises(SettingError, match=r"\['w'\] is not on worker 2 what"):
        check(laid(int(mesh.devices[2, 1].id)))
    # Along the axis of the workers each has its own rows.
    own = jax.device_put(whole, jax.NamedSharding(mesh, P("data")))
    gc.check_equal_start({"w": own}, mesh, param_specs={"w": P("data")})
    with pytest.raises(ValueError, match=r"axis_name must be of the mesh's axes .*, got 'workers'"):
        gc.check_equal_start({}, mesh, axis_name="workers")


PROGRAM = """
import sys, jax, numpy as np
import gradcomp_jax as gc
address, index, scale, rows = sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:5])
jax.distributed.initialize(address, 2, index)
params = {"bias": np.zeros(4, np.float32), "kernel": np.full((rows, 8), scale, np.float32)}
mesh = jax.make_mesh((jax.device_count(),), ("data",))
try:
    gc.check_equal_start(params, mesh)
    print("equal")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "said"),
    [
        (("1", "4"), "^equal$"),
        (
            ("2", "4"),
            r"the workers do not start equal: \['kernel'\] is not on workers 2 and 3 what it is on worker 0: make",
        ),
        (
            ("1", "5"),
            r"the processes differ: \['kernel'\] is float32\[4, 8\] in process 0 and float32\[5, 8\] in process 1",
        ),
    ],
)
def test_processes_start_equal(second: tuple[str, str], said: str, tmp_path: pathlib.Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    told = (("1", "4"), second)
    commands = [[sys.executable, "-c", PROGRAM, address, str(i), *words] for i, words in enumerate(told)]
    env = environment(2, PYTHONPATH=os.pathsep.join(sys.path))
    with started(tmp_path, commands, [env] * 2) as running:
        assert wait(running, within_s=PATIENCE_S) == [0, 0], running[0].stderr + running[1].stderr
    for process in running:
        assert re.search(said, process.stdout, re.MULTILINE), process.stdout
