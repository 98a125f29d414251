"""On CPU devices steps do not queue up: XLA's pool would starve, and the process end after 40 s."""

import os
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

from gradcomp_jax.training.step import TrainStep


class Result:
    """Something that may be waited for."""

    def __init__(self, log: list[str], number: int) -> None:
        self.log, self.number = log, number

    def block_until_ready(self) -> "Result":
        self.log.append(f"wait {self.number}")
        return self


def mesh_on(platform: str, size: int) -> Any:
    devices = np.array([types.SimpleNamespace(platform=platform)] * size)
    return types.SimpleNamespace(size=size, devices=devices)


@pytest.mark.parametrize(("platform", "size", "waits"), [("cpu", 8, True), ("cpu", 1, False), ("tpu", 8, False)])
def test_a_step_waits_for_the_one_before_the_last(platform: str, size: int, waits: bool) -> None:
    log: list[str] = []

    def jitted(state: int, batch: None) -> tuple[int, dict[str, Any]]:
        log.append(f"run {state}")
        return state + 1, {"loss": Result(log, state), "skipped": 0.0}

    step, state = TrainStep(jitted, mesh_on(platform, size)), 0  # type: ignore[arg-type]
    for _ in range(3):
        state, _ = step(state, None)
    assert log == (["run 0", "run 1", "wait 0", "run 2", "wait 1"] if waits else ["run 0", "run 1", "run 2"])


def test_inside_another_program_nothing_is_waited_for() -> None:
    step = TrainStep(lambda state, batch: (state + 1, {"loss": state, "skipped": state}), mesh_on("cpu", 8))  # type: ignore[arg-type]

    def twice(state: Any) -> Any:
        state, _ = step(state, None)
        return step(state, None)[0]

    assert jax.eval_shape(twice, np.int32(0)).shape == ()


def test_steps_that_are_skipped_are_told() -> None:
    step = TrainStep(lambda state, batch: (state + 1, {"loss": 0.0, "skipped": state}), mesh_on("tpu", 8))  # type: ignore
    with pytest.warns(UserWarning, match="25 steps in a row were skipped"):
        for state in range(30):
            step(state, None)


PROGRAM = """
import jax, jax.numpy as jnp, optax, gradcomp_jax as gc
loss = lambda p, b: jnp.mean((jnp.tanh(b[0] @ p["w"]) @ p["v"] - b[1]) ** 2)
mesh = jax.make_mesh((8,), ("data",))
params = {"w": 0.1 * jax.random.normal(jax.random.key(1), (64, 64)), "v": jnp.zeros((64, 1))}
tx = optax.chain(gc.dgc(axis_name="data"), optax.sgd(0.01))
state, step = gc.init_state(params, tx, mesh), gc.make_train_step(loss, tx, mesh)
x = jax.random.normal(jax.random.key(0), (128, 64))
batch = jax.device_put((x, jnp.sin(x[:, :1])), gc.data_sharding(mesh))
for _ in range(500):
    state, metrics = step(state, batch)
print(int(state.step), float(metrics["loss"]) < 1)
"""


@pytest.mark.slow
def test_hundreds_of_steps_that_nobody_waits_for() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "500 True\n"), done.stderr[-2000:]
