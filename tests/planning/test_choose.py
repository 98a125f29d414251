"""The choice at the start of a run: by a link of a given speed, in the order of the candidates, alike in all processes."""

import importlib
import logging
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.planning import Calibration, Device, fit
from gradcomp_jax.planning.calibrate import KINDS, SIZES
from gradcomp_jax.planning.fitting import Point
from gradcomp_jax.planning.predict import CLEAR
from tests.network.processes import environment, free_port, started, wait

AXIS, N = "data", 4
PARAMS = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32), "b": jax.ShapeDtypeStruct((1024,), jnp.float32)}
BYTES = 4 * (1024 * 1024 + 1024)
COMPUTE = 0.1
DEVICE = Device(1e11, {"dense": 2.0, "dense_bf16": 3.0, "block_quantized": 4.0, "dgc": 5.0})


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((N,), (AXIS,), devices=jax.devices()[:N])


def link(rate: float, latency: float = 1e-5, workers: int = N, kinds: Any = KINDS) -> Calibration:
    """A calibration of a link that takes so long, to the digit."""
    times = [(size, latency + size / rate) for size in SIZES]
    return Calibration(workers, {kind: fit([Point(s, t, t, t) for s, t in times]) for kind in kinds}, DEVICE)


def candidates() -> dict[str, optax.GradientTransformation]:
    return {
        "plain": optax.chain(gc.dense(axis_name=AXIS), optax.trace(0.9)),
        "int8": gc.block_quantized(axis_name=AXIS),
        "sparse": gc.dgc(axis_name=AXIS),
    }


@pytest.mark.parametrize(("rate", "expected"), [(1e12, "plain"), (5e7, "int8"), (1e6, "sparse")])
def test_a_fast_link_is_dense_and_a_slow_one_compresses(mesh, rate: float, expected: str, caplog) -> None:
    """At 50 MB/s int8 is within 5% of what sends hundreds of times less: the milder one is taken."""
    with caplog.at_level(logging.INFO, logger="gradcomp_jax"):
        choice = gc.choose(candidates(), PARAMS, mesh, compute=1.0 if rate == 5e7 else COMPUTE, calibration=link(rate))
    assert choice.name == expected
    (record,) = caplog.records
    assert record.name == "gradcomp_jax.planning.choose" and record.getMessage() == str(choice)
    assert str(choice).startswith(
        f"{expected} for 4 workers along 'data', the first whose step is predicted within 5% of"
    )
    steps = {p.method: p.step for p in choice.predictions}
    assert list(steps) == ["plain", "int8", "sparse"]
    fastest = min(steps.values())
    assert steps[expected] <= CLEAR * fastest
    assert all(steps[name] > CLEAR * fastest for name in list(steps)[: list(steps).index(expected)])


def test_a_prediction_is_the_planners(mesh) -> None:
    """Of a method with its defaults, under the name of the candidate."""
    found = link(1e7)
    made = {"a": gc.dense(axis_name=AXIS, dtype="bfloat16"), "b": gc.dgc(axis_name=AXIS)}
    choice = gc.choose(made, PARAMS, mesh, compute=COMPUTE, overlap=0.5, calibration=found)
    workload = gc.Workload.of(PARAMS, COMPUTE, overlap=0.5)
    for got, method in zip(choice.predictions, ("dense_bf16", "dgc"), strict=True):
        want = gc.predict(workload, gc.Cluster(N, gc.Link(1.0, 1.0)), method, calibration=found)
        for field in ("compute", "compress", "outer", "exposed", "sent", "state", "step"):
            assert getattr(got, field) == pytest.approx(getattr(want, field), rel=1e-6), (method, field)


def test_within_a_hierarchy_a_device_compresses_its_part() -> None:
    """As the planner counts it: four devices of a node have a quarter of the arithmetic each."""
    nodes = jax.make_mesh((2, 4), ("nodes", "chips"))
    made = {
        "flat": gc.block_quantized(axis_name="nodes"),
        "parts": gc.hierarchical(gc.block_quantized(axis_name="nodes"), axis_name="nodes", inner_axis_name="chips"),
    }
    choice = gc.choose(made, PARAMS, nodes, compute=COMPUTE, axis_name="nodes", calibration=link(1e7, workers=2))
    whole, part = (p.compress for p in choice.predictions)
    assert whole == pytest.approx(DEVICE.compression("block_quantized", BYTES // 4))
    assert part == pytest.approx(whole / 4)


def test_a_custom_exchange_needs_its_seconds(mesh) -> None:
    own = {"dense": gc.dense(axis_name=AXIS), "own": gc.exchange(gc.compressors.topk(0.01), axis_name=AXIS)}
    with pytest.raises(ValueError, match=r"'own' is made by exchange, .* give compress=\{'own': seconds\}"):
        gc.choose(own, PARAMS, mesh, compute=COMPUTE, calibration=link(1e6))
    for seconds, expected in ((0.01, "own"), (100.0, "dense")):
        choice = gc.choose(
            own, PARAMS, mesh, compute=COMPUTE, calibration=link(1e6), compress={"own": seconds, "dense": 0.0}
        )
        assert choice.name == expected and choice.predictions[1].compress == pytest.approx(seconds)


def test_what_is_measured_without_a_calibration(mesh, monkeypatch) -> None:
    asked: list[Any] = []

    def calibrate(mesh, **options):
        asked.append(options)
        return link(1e6, kinds=options["kinds"])

    monkeypatch.setattr(importlib.import_module("gradcomp_jax.planning.choose"), "calibrate", calibrate)
    gc.choose(candidates(), PARAMS, mesh, compute=30.0, compress={"sparse": 0.0})
    (options,) = asked
    assert options["kinds"] == ["all-reduce", "all-gather", "all-to-all"]
    assert list(options["methods"]) == ["dense", "block_quantized"] and options["params"] is PARAMS
    assert options["axis_name"] == AXIS and options["pause"] == 0.5


def test_one_worker_measures_nothing() -> None:
    alone = jax.make_mesh((1,), (AXIS,), devices=jax.devices()[:1])
    choice = gc.choose(candidates(), PARAMS, alone, compute=COMPUTE)
    assert choice.name == "plain" and all(p.step == pytest.approx(COMPUTE) for p in choice.predictions)


def test_along_one_axis_of_a_mesh_with_two() -> None:
    """The dense sums within a worker are the same for all candidates, and belong to the computation."""
    mesh = jax.make_mesh((2, 4), (AXIS, "inner"))
    made = {n: gc.hierarchical(tx, axis_name=AXIS, inner_axis_name="inner") for n, tx in candidates().items()}
    choice = gc.choose(made, PARAMS, mesh, compute=COMPUTE, calibration=link(1e6, workers=2))
    assert choice.name == "sparse" and choice.workers == 2
    assert choice.predictions[0].sent == pytest.approx(BYTES / 4, rel=0.01)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"candidates": {}}, "candidates must not be empty"),
        ({"axis_name": "dat"}, "axis_name must be one of 'data', got 'dat'; did you mean 'data'"),
        ({"calibration": link(1e6, workers=8)}, "the calibration is of 8 workers, and 4 exchange here"),
        ({"calibration": link(1e6, kinds=["all-reduce"])}, "nothing is known of all-to-all: calibrate"),
        ({"compute": -1.0}, "compute must be finite and at least 0 seconds"),
        ({"overlap": 2.0}, r"overlap must be in \[0, 1\]"),
    ],
)
def test_refusals(mesh, given: dict[str, Any], sentence: str) -> None:
    options = {"candidates": candidates(), "compute": COMPUTE, "calibration": link(1e6)} | given
    with pytest.raises(ValueError, match=sentence):
        gc.choose(options.pop("candidates"), PARAMS, mesh, **options)


@pytest.mark.slow
def test_on_a_real_link_and_then_in_a_train_step(mesh) -> None:
    """Nothing is faked: simulated devices, whose memory is the link."""
    params = {name: np.zeros(spec.shape, np.float32) for name, spec in PARAMS.items()}
    choice = gc.choose(candidates(), params, mesh, compute=COMPUTE)
    assert all(p.outer > 0 and p.compress > 0 for p in choice.predictions)
    tx = optax.chain(gc.switched(candidates()), optax.sgd(0.1))
    state = gc.set_choice(gc.init_state(params, tx, mesh), choice.name)
    step = gc.make_train_step(lambda p, x: jnp.mean((x @ p["w"] + p["b"] - 1.0) ** 2), tx, mesh)
    state, metrics = step(state, jax.device_put(np.ones((N, 1024), np.float32), gc.data_sharding(mesh)))
    assert np.isfinite(metrics["loss"])
    assert list(candidates())[int(state.opt_state[0].choice)] == choice.name


PROCESS = """
import sys, time
import jax, numpy as np, optax
address, index = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, index)
import gradcomp_jax as gc
from tests.planning.test_choose import AXIS, candidates, link
mesh = jax.make_mesh((2,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
params = {"w": np.zeros((256, 256), np.float32)}
# Each by itself would choose otherwise: one finds compression slow, the other one quick.
compress = {"plain": 0.0, "int8": 1.0, "sparse": [0.0, 1.0][index]}
choice = gc.choose(candidates(), params, mesh, compute=0.01, calibration=link(1e5, workers=2), compress=compress)
print("agreed", choice)
measured = gc.choose(candidates(), params, mesh, compute=0.01 * (1 + index))
print("measured", measured.name, [p.step for p in measured.predictions])
tx = optax.chain(gc.switched(candidates()), optax.sgd(0.1))
state = gc.set_choice(gc.init_state(params, tx, mesh), "sparse")
gc.check_equal_start(state, mesh)
try:
    gc.check_equal_start(gc.set_choice(state, ["plain", "int8"][index]), mesh)
except ValueError as error:
    print("apart", error)
step = gc.make_train_step(lambda p, x: ((x @ p["w"] - 1.0) ** 2).mean(), tx, mesh)
whole, sharding = np.ones((4, 256), np.float32), gc.data_sharding(mesh)
batch = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
for name in ("sparse", "int8", choice.name):
    state, metrics = step(gc.set_choice(state, name), batch)
print("trained", float(metrics["loss"]), step._cache_size())
"""


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_processes_that_measure_differently_choose_alike(tmp_path: pathlib.Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    commands = [[sys.executable, "-c", PROCESS, address, str(index)] for index in range(2)]
    env = environment(PYTHONPATH=str(pathlib.Path(__file__).parents[2]))
    with started(tmp_path, commands, [env] * 2) as running:
        assert wait(running, within_s=240) == [0, 0], [process.stderr[-3000:] for process in running]
        said = [[line for line in p.stdout.splitlines() if not line.startswith("[Gloo]")] for p in running]
    assert said[0] == said[1] and [line.split()[0] for line in said[0]] == ["agreed", "measured", "apart", "trained"]
    # The mean of both is 0.5 s of compression, which beats seconds of waiting for dense.
    assert said[0][0].startswith("agreed sparse") and "0.5 compressing" in said[0][0]
    assert ".choice" in said[0][2]
    # One program for all three choices.
    assert said[0][3].endswith(" 1")


def test_a_task_or_an_optimizer_weighs_steps_by_their_price(mesh) -> None:
    """DGC's runs came as far as dense on a conv net, and not on a transformer; of Adam on a conv net there are none."""
    made = {"plain": gc.dense(axis_name=AXIS), "sparse": gc.dgc(axis_name=AXIS)}

    def chosen(rate: float = 1e6, **asked: str) -> str:
        return gc.choose(made, PARAMS, mesh, compute=COMPUTE, calibration=link(rate), **asked).name

    assert chosen() == chosen(task="conv", optimizer="sgd") == "sparse"
    assert chosen(task="conv", optimizer="adamw") == "plain"
    assert chosen(2e7) == chosen(2e7, task="conv") == "sparse"
    assert chosen(2e7, task="transformer") == chosen(2e7, optimizer="adamw") == "plain"
    with pytest.raises(ValueError, match="task must be one of"):
        chosen(task="vit")
