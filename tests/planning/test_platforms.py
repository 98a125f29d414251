"""The figures of platforms: what a plan makes of them, and that the package has what the compilers said."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from benchmarks import platforms as command
from gradcomp_jax.methods import METHODS
from gradcomp_jax.planning import PLATFORMS, Device, Workload, break_even, platforms, predict
from gradcomp_jax.planning.platforms import ALL_REDUCED
from gradcomp_jax.planning.traffic import read_method
from gradcomp_jax.planning.workload import _SIMULATED, profile_compression

BUILT_IN = [name for name in METHODS if name in PLATFORMS["cpu"].methods]
each = pytest.mark.parametrize("name", PLATFORMS)


@pytest.fixture(autouse=True)
def found_again():
    platforms.here.cache_clear()
    yield
    platforms.here.cache_clear()


def test_a_billion_values_over_400_gbit_on_v5e_are_not_compressed_by_dgc() -> None:
    """The step by hand: the compiler's seconds, and the bytes over the link; dense bfloat16 in one all-reduce."""
    v5e, values = PLATFORMS["v5e"].methods, command.BILLION.values
    sent = 2 * 63 / 64 * 2 * values / 50e9
    dense, dgc = (1e-12 * v5e[name].ps * values for name in (ALL_REDUCED, "dgc"))
    by_hand = (0.1 + sent + dense) / (0.1 + dgc)
    assert command.gain("dgc", "v5e") == pytest.approx(by_hand, rel=0.05)
    assert command.gain("dgc", "v5e") < 1 < command.gain("dgc", "h100")
    verdict = gc.should_compress(command.BILLION, command.NODES, methods=["dgc"], device="v5e", prices={})
    assert not verdict.compress and verdict.method == "dense_bf16"
    assert {p.figures for p in verdict.ranking} == {"v5e, compiled"}


@pytest.mark.parametrize("name", ["v5p", "v5e"])
@pytest.mark.parametrize(("method", "bits"), [("dgc", 0.03), ("block_quantized", 8.1)])
def test_break_even_is_what_bytes_and_seconds_say(name: str, method: str, bits: float) -> None:
    """On the tensor that was compiled: what bfloat16 sends more, over what the method computes longer."""
    one = PLATFORMS[name]
    own, dense = (one.seconds(key, command.TENSOR.values, 1) for key in (method, ALL_REDUCED))
    more = 2 * 63 / 64 * command.TENSOR.values * (16 - bits) / 8
    even = break_even(command.TENSOR, command.NODES, method, device=name, prices={})
    assert even == pytest.approx(more / (own - dense), rel=0.03)


def test_the_package_has_what_was_compiled() -> None:
    """And the larger tensor takes what its compiler said, to the digits that are kept."""
    kept = json.loads((platforms.DATA.parents[2] / command.ROWS).read_text(encoding="utf-8"))
    assert json.loads(platforms.DATA.read_text(encoding="utf-8")) == command.packed(kept)
    for name in ("v5p", "v5e", "h100"):
        assert set(kept[name]["rows"]) == {*BUILT_IN, ALL_REDUCED}
        for method, rows in kept[name]["rows"].items():
            seconds, launches = rows["one"]
            figures = PLATFORMS[name].methods[method]
            assert figures.launches + figures.beside == pytest.approx(launches, abs=0.2)
            assert PLATFORMS[name].seconds(method, 2**23, 1) == pytest.approx(seconds, rel=2e-3)


@each
def test_every_registered_method_has_figures_that_grow(name: str) -> None:
    one = PLATFORMS[name]
    assert one.how in ("measured", "compiled", "estimated") and one.source
    assert set(one.methods) - {ALL_REDUCED} == set(BUILT_IN)
    for method in one.methods:
        assert 0 < one.seconds(method, 2**20, 1) < one.seconds(method, 2**21, 1) <= one.seconds(method, 2**21, 9)
    slower = Device(one.memory_rate / 2, platform=name)
    assert slower.compression("dgc", 2**20) == pytest.approx(2 * one.seconds("dgc", 2**20, 1))


@pytest.mark.parametrize(
    ("platform", "kind", "expected", "why"),
    [
        ("tpu", "TPU v5 lite", "v5e", "which JAX finds here"),
        ("tpu", "TPU v5", "v5p", "which JAX finds here"),
        ("tpu", "TPU v4", "v5p", "assumed, because nothing is known of TPU v4, which JAX finds here"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100", "which JAX finds here"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "a100", "which JAX finds here"),
        ("gpu", "NVIDIA L4", "h100", "assumed, because nothing is known of NVIDIA L4, which JAX finds here"),
        ("cpu", "cpu", "cpu", "which JAX finds here"),
        (None, "", "cpu", "assumed, because JAX finds no device"),
    ],
)
def test_the_platform_is_that_of_the_devices(monkeypatch, platform, kind, expected, why) -> None:
    def devices():
        if platform is None:
            raise RuntimeError("held by another process")
        return [types.SimpleNamespace(platform=platform, device_kind=kind)]

    monkeypatch.setattr(platforms.jax, "devices", devices)
    device = Device()
    assert (device.known.name, device.why) == (expected, why)
    work, nodes = Workload(0.1, ((1024, 1024),)), gc.Cluster(8, gc.Link(1e9, 0.0))
    assert predict(work, nodes, "dgc").compress == predict(work, nodes, "dgc", device=expected).compress > 0
    with pytest.raises(ValueError, match=r"platform must be one of .*, got 'v5'"):
        predict(work, nodes, "dgc", device="v5")


def test_a_tensor_costs_its_kernels() -> None:
    """As many values in more tensors take longer by the kernels of these; vectors go dense, all together."""
    whole, parts, vectors = (
        Workload(0.1, shapes) for shapes in (((1024, 1024),), ((32, 1024),) * 32, ((1024, 1000), *(((1024,),) * 24)))
    )
    assert (whole.tensors, parts.tensors, vectors.tensors) == (
        1,
        32,
        1,
    ) and whole.values == parts.values == vectors.values
    h100 = PLATFORMS["h100"]
    one, many, flat = (
        predict(work, gc.Cluster(8, gc.Link(1e9, 0.0)), "dgc", device="h100").compress
        for work in (whole, parts, vectors)
    )
    assert many - one == pytest.approx(31 * h100.methods["dgc"].launches * h100.launch) and one == flat


def test_four_workers_exchange_as_many_do() -> None:
    """So that what is compiled for four and timed for four is what a worker of many does, an owner's part included."""
    for method in BUILT_IN:
        few, many = (
            {c.kind for c in read_method(method, ((1024, 1024), (1024,)), n).collectives} for n in (_SIMULATED, 64)
        )
        assert few == many, method


def test_what_was_measured_on_your_tree_takes_the_place_of_the_table() -> None:
    """Of four workers on one device; a method that was not timed has the platform's figures, at the measured rate."""
    params = {"w": jax.ShapeDtypeStruct((64, 1024), jnp.float32), "b": np.zeros(7, np.float32)}
    device = profile_compression(["block_quantized", "dgc"], params=params, repeats=1)
    assert set(device.copies) == {"block_quantized", "dgc"} and device.platform == "cpu"
    values = 64 * 1024 + 7
    assert device.compression("dgc", values) == pytest.approx(device.copies["dgc"] * 8 * values / device.rate)
    cpu = PLATFORMS["cpu"]
    other = cpu.seconds("powersgd", values, 1) * cpu.memory_rate / device.rate
    assert device.compression("powersgd", values) == pytest.approx(other)
    work = Workload.of(params, 0.1)
    found = [
        predict(work, gc.Cluster(4, gc.Link(1e9, 0.0)), name, device=device).figures for name in ("dgc", "powersgd")
    ]
    assert found == ["cpu, measured", "cpu, measured"] and device.basis("dgc") == "measured"
