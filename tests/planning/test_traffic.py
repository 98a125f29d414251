"""What exchanges say of themselves, against their programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import gradcomp_jax as gc
from gradcomp_jax.methods import METHODS
from gradcomp_jax.methods.traffic import traffic_of
from gradcomp_jax.planning import MODELS, traffic
from gradcomp_jax.planning.communication import _shards
from tests.marks import slow_but

# A few layers of different kinds, some small or of odd sizes.
SHAPES = ((3, 3, 128, 256), (256,), (2048, 1000), (1000,), (512, 2048), (64, 3))
PARAMS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]


def lowered(tx, params, **axes):
    """Bytes of a program that is lowered for an abstract mesh, with gradients of every device."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    count = mesh.size

    def update(stacked, params):
        return tx.update(jax.tree.map(lambda g: g[0], stacked), tx.init(params), params)[0]

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(jax.P(tuple(axes)), jax.P()), out_specs=jax.P())
    stacked = [jax.ShapeDtypeStruct((count, *p.shape), p.dtype) for p in params]
    program = jax.jit(mapped).trace(stacked, params).lower(lowering_platforms=("cpu",))
    return gc.wire_bytes(program.as_text(dialect="hlo"), branch=-1)


def by_kind(report) -> dict[str, tuple]:
    return {kind: (row.count, row.sent, row.operand) for kind, row in report.by("kind").items()}


PROGRAMS = {
    **{name: (METHODS[name].build, 8) for name in ("dgc", "terngrad", "dense_bf16")},
    "powersgd": (METHODS["powersgd"].build, 2),
    "dgc, 24": (METHODS["dgc"].build, 24),
    "terngrad, 1024": (METHODS["terngrad"].build, 1024),
    "terngrad, added": (functools.partial(gc.terngrad, collective="all_reduce"), 8),
    "doubling": (functools.partial(gc.topk_sgd, density=0.02, collective="recursive_doubling"), 8),
    "warm-up": (functools.partial(gc.dgc, density=0.01, warm_up=gc.warm_up(1, (0.25, 0.05))), 8),
    "clipping": (functools.partial(gc.dgc, clip_norm=1.0, weight_decay=0.1), 8),
    "buckets": (lambda axis_name: gc.bucketed(gc.dgc(axis_name=axis_name), bucket_bytes=2**20), 8),
}


@pytest.mark.parametrize(
    "name", slow_but(("dgc", "terngrad", "powersgd", "dense_bf16", "dgc, 24", "buckets"), PROGRAMS)
)
def test_a_description_is_what_the_program_sends(name: str) -> None:
    """To the byte and the launch; test_wire.py compares all methods with compiled programs."""
    make, workers = PROGRAMS[name]
    tx = make(axis_name="workers")
    found = traffic_of(tx, PARAMS, {"workers": workers})
    assert {c.kind: tuple(c[1:]) for c in found.collectives} == by_kind(lowered(tx, PARAMS, workers=workers))


def test_what_goes_dense_is_counted() -> None:
    """Vectors cross as float32: with a payload, or in a sum of their own where there is none; and so does a flag."""
    (only,) = traffic.read_method("terngrad", ((1000,), (10,)), 4).collectives
    assert only == ("all-reduce", 1, 2 * 3 / 4 * 4 * 1011, 4 * 1011)
    large = traffic.read_method("dgc", ((1024, 1024), (2**19,)), 4).collectives
    assert {c.kind for c in large} == {"all-to-all", "all-gather"}


def test_one_worker_sends_nothing() -> None:
    assert traffic.read_method("dgc", SHAPES, 1).sent == 0 == traffic.read(METHODS["dgc"].build, PARAMS, 1).sent
    with pytest.raises(ValueError, match="did you mean 'terngrad'"):
        traffic.read_method("terngard", SHAPES, 4)


def test_models_of_hundreds_of_tensors_are_quick_to_read() -> None:
    shapes = tuple(leaf.shape for leaf in MODELS["llama-8b"]().values())
    found = traffic.read_method("block_quantized", shapes, 64)
    values = sum(leaf.size for leaf in MODELS["llama-8b"]().values())
    assert found.sent == pytest.approx(2 * 63 / 64 * values * 65 / 64, rel=0.02)


@pytest.mark.parametrize("name", ["terngrad", "dgc"])
def test_very_many_equal_tensors_are_extended(name: str) -> None:
    shapes = (*[(512, 512)] * 300, *[(512,)] * 300)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    exact, found = traffic.read(METHODS[name].build, params, 24), traffic.read_method(name, shapes, 24)
    for a, b in zip(exact.collectives, found.collectives, strict=True):
        assert a[:2] == b[:2] and a[2:] == pytest.approx(b[2:], rel=1e-3, abs=64)
    assert found.state == pytest.approx(exact.state, rel=1e-3)


@pytest.mark.parametrize("name", ["dgc", "powersgd"])
def test_a_nodes_devices_send_their_shards(name: str) -> None:
    """Between 8 nodes of 4 devices, each device sends what the method says of a quarter of every tensor's rows."""
    nodes, per_node = 8, 4
    tx = gc.hierarchical(METHODS[name].build(axis_name="nodes"), axis_name="nodes", inner_axis_name="devices")
    report = lowered(tx, PARAMS, nodes=nodes, devices=per_node)
    between = report.by("group_size")[nodes]
    assert traffic.read_method(name, _shards(SHAPES, per_node), nodes).sent == pytest.approx(between.sent, rel=0.05)
    found = traffic_of(tx, PARAMS, {"nodes": nodes, "devices": per_node})
    assert {c.kind: tuple(c[1:]) for c in found.collectives} == by_kind(report)
    assert traffic_of(tx, PARAMS, {"nodes": nodes, "devices": per_node}, between="nodes").sent == between.sent
