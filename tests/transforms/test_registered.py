"""States are nodes of every tool's trees: optax's map over parameters, Flax's bytes, pickle and copies."""

import copy
import functools
import importlib
import pathlib
import pickle
import pkgutil
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from gradcomp_jax import _registered
from gradcomp_jax.methods.registry import METHODS

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": np.ones((32, 8), np.float32), "b": np.ones(8, np.float32)}
SPECS = {"w": P(None, "model"), "b": P("model")}


def method(name: str, **options):
    return METHODS[name].build(axis_name=None, **options)


WRAPPERS = {
    "exchange": lambda: gc.exchange(
        gc.compressors.topk(0.0625, block=32), axis_name=None, memory=gc.memory.residual(dtype="int8")
    ),
    "float8": lambda: gc.exchange(
        gc.compressors.topk(0.0625, block=32),
        axis_name=None,
        memory=gc.memory.momentum_correction(dtype="float8_e4m3fn"),
    ),
    "bfloat16": lambda: gc.dgc(axis_name=None, memory_dtype="bfloat16"),
    "warm_up": lambda: gc.dgc(axis_name=None, warm_up=((4, 0.25),)),
    "weighted": lambda: gc.weighted(method("dgc"), axis_name=None),
    "rate_weighted": lambda: gc.rate_weighted(gc.topk_sgd(axis_name=None, density=0.1), lambda _: 0.1),
    "running_sum": lambda: gc.running_sum(
        gc.exchange(gc.compressors.topk(0.0625), axis_name=None, memory=gc.memory.estimate())
    ),
    "switched": lambda: gc.switched({"dense": gc.dense(axis_name=None), "dgc": method("dgc")}),
    "scaled": lambda: gc.dynamic_loss_scale(gc.master_weights(optax.chain(method("dgc"), optax.adam(0.1)))),
    "schedule": lambda: gc.density_schedule((0.5, 0.25), lambda step: 0, axis_name=None),
    "controller": lambda: gc.density_controller((0.5, 0.25), 0.1, axis_name=None),
    "bucketed": lambda: gc.bucketed(method("dgc"), bucket_bytes=64),
    "accumulate": lambda: gc.accumulate(method("dgc"), axis_name=None, every=2),
    "delayed": lambda: gc.delayed_average(gc.dense(axis_name=None), axis_name=None, delay=1),
    "elastic": lambda: gc.elastic_average(gc.dense(axis_name=None), axis_name=None, every=2),
    "gossip": lambda: gc.gossip(axis_name=None),
    "local_sgd": lambda: gc.local_sgd(gc.dense(axis_name=None), axis_name=None, every=2),
    "diloco": lambda: gc.diloco(gc.dense(axis_name=None), axis_name=None, every=4),
    "streamed": lambda: gc.diloco(gc.dense(axis_name=None), axis_name=None, every=4, parts=2, delay=1),
    "sparse_loco": lambda: gc.sparse_loco(axis_name=None, every=4),
    "masked": lambda: optax.masked(method("dgc"), {"w": True, "b": False}),
    "partition": lambda: optax.partition({"x": method("dgc"), "y": gc.set_to_zero()}, {"w": "x", "b": "y"}),
}
MADE = {**{name: functools.partial(method, name) for name in METHODS}, **WRAPPERS}


def chain(name: str):
    return optax.chain(MADE[name](), optax.adam(0.1))


@functools.cache
def begun(name: str):
    """A chain's state, with numbers in the place of zeros, so that a leaf that goes astray is seen."""
    state = jax.eval_shape(chain(name).init, PARAMS)
    leaves, treedef = jax.tree.flatten(state)
    rng = np.random.default_rng(0)
    values = [np.frombuffer(rng.bytes(x.size * x.dtype.itemsize), x.dtype).reshape(x.shape) for x in leaves]
    return jax.tree.unflatten(treedef, values)


def bits(tree) -> list:
    return [(np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def same(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert bits(found) == bits(wanted)


@pytest.mark.parametrize("name", MADE)
def test_optax_finds_the_moments_and_nothing_of_an_exchange(name: str) -> None:
    tx, state = chain(name), begun(name)
    jax.eval_shape(tx.init, PARAMS)
    specs = optax.tree.map_params(tx, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: P())
    adam = specs[1][0]
    assert adam.mu == adam.nu == SPECS and adam.count == P()
    residuals = [x for x in jax.tree.leaves(state, is_leaf=gc.per_device.is_per_device) if isinstance(x, gc.PerDevice)]
    theirs = jax.tree.map(
        lambda leaf, spec: spec, state, jax.tree.broadcast(specs, state, is_leaf=lambda x: isinstance(x, P))
    )
    marked = [x for x in jax.tree.leaves(theirs, is_leaf=gc.per_device.is_per_device) if isinstance(x, gc.PerDevice)]
    assert len(marked) == len(residuals) and all(x.value == P() for x in marked)
    # Leaf by leaf, so that a function of arrays may be given.
    zeros = optax.tree.map_params(tx, np.zeros_like, state, transform_non_params=np.zeros_like)
    same(zeros, jax.tree.map(np.zeros_like, state))
    same(optax.tree.map_params(tx, lambda x: x, state), state)


@pytest.mark.parametrize("name", MADE)
def test_bytes_pickles_and_copies_keep_every_bit(name: str) -> None:
    state = begun(name)
    like = jax.tree.map(np.zeros_like, state)
    same(serialization.from_bytes(like, serialization.to_bytes(state)), state)
    same(serialization.from_state_dict(like, serialization.to_state_dict(state)), state)
    same(pickle.loads(pickle.dumps(state)), state)
    same(copy.deepcopy(state), state)


def test_every_node_of_the_package_is_known_to_flax() -> None:
    for module in pkgutil.walk_packages(gc.__path__, "gradcomp_jax."):
        if not module.name.startswith(("gradcomp_jax.cli", "gradcomp_jax.experiments")):
            importlib.import_module(module.name)
    assert {gc.ExchangeState, gc.PerDevice} < set(_registered.NODES)
    assert all(serialization.is_serializable(node) for node in _registered.NODES)
    sources = pathlib.Path(gc.__file__).parent.rglob("*.py")
    assert [
        p.name for p in sources if "register_dataclass(" in p.read_text() or "register_dataclass\n" in p.read_text()
    ] == ["_registered.py"]


OVER_TWO_AXES = {
    "hierarchical": lambda: gc.hierarchical(gc.dgc(axis_name="data"), axis_name="data", inner_axis_name="model"),
    "model_parallel": lambda: gc.model_parallel(
        gc.dgc(axis_name="data"), axis_name="data", model_axis_name="model", param_specs=SPECS
    ),
}


@pytest.mark.parametrize("name", OVER_TWO_AXES)
def test_shards_of_workers_of_several_devices_are_of_no_parameter(name: str) -> None:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=auto)
    tx = optax.chain(OVER_TWO_AXES[name](), optax.adam(0.1))
    axes = ("data", "model") if name == "hierarchical" else "data"
    state = jax.eval_shape(lambda p: gc.init_opt_state(p, tx, mesh, axis_name=axes)[0], PARAMS)
    specs = optax.tree.map_params(tx, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: P())
    assert specs[1][0].mu == SPECS and set(jax.tree.leaves(specs[0], is_leaf=lambda x: isinstance(x, P))) == {P()}
    assert jax.tree.structure(optax.tree.map_params(tx, lambda x: 0, state, transform_non_params=lambda _: 0)) == (
        jax.tree.structure(state)
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", ("flax.serialization, gradcomp_jax", "gradcomp_jax, flax.serialization"))
def test_either_may_be_imported_first(order: str) -> None:
    program = (
        f"import {order}\n"
        "import sys, flax.serialization as f, gradcomp_jax as gc\n"
        "assert f.is_serializable(gc.ExchangeState) and f.is_serializable(gc.PerDevice)\n"
        "assert not any('WhenFlax' in type(finder).__name__ for finder in sys.meta_path)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bytes_of_another_state_are_refused_by_name() -> None:
    state = begun("dgc")[0]
    other = serialization.to_state_dict(state)
    with pytest.raises(ValueError, match="ExchangeState has the fields step, skipped"):
        serialization.from_state_dict(state, {"0": other} if isinstance(state, tuple) else {**other, "more": 1})
