"""Long rows in lanes: what crosses so is what crosses plainly, and little is filled up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gradcomp_jax.collectives import fused, tpu

N = 4
LENGTHS = (tpu.LONG + 5, 7, tpu.LONG, 300)


def rows(dtype: str) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (N * N, n)).astype(dtype) for n in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "parts"), [("uint8", 1), ("uint16", 1), ("uint8", 3)])
def test_what_crosses_in_lanes_is_what_crosses(monkeypatch, dtype: str, parts: int) -> None:
    filled = sum(-(-n // tpu.LANES) * tpu.LANES for n in LENGTHS)
    monkeypatch.setattr(tpu, "MOST_BYTES", N * (filled + tpu.LANES) * np.dtype(dtype).itemsize // parts)
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N], axis_types=(AxisType.Auto,))

    def both(*arrays: jax.Array) -> tuple[list, list]:
        return tpu.all_to_all_in_lanes(arrays, "data"), fused.all_to_all(arrays, "data")

    given = rows(dtype)
    mapped = jax.shard_map(both, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    lowered = jax.jit(mapped).lower(*given)
    assert lowered.as_text().count('"stablehlo.all_to_all"') == parts + 1
    for one, other in zip(*jax.jit(mapped)(*given), strict=True):
        np.testing.assert_array_equal(one, other)
    first = np.asarray(jax.jit(mapped)(*given)[0][1]).reshape(N, N, -1)
    np.testing.assert_array_equal(first, given[1].reshape(N, N, -1).swapaxes(0, 1))


@pytest.mark.slow
def test_rows_of_whole_lanes_cross_as_they_are() -> None:
    """All-to-all and all-gather in rows of 256, and in which rows arrays cross."""
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N], axis_types=(AxisType.Auto,))

    def both(*arrays: jax.Array) -> list[tuple[list, list]]:
        gathered = tpu.all_gather_in_lanes([a.reshape(-1) for a in arrays], "data", 256)
        plain = [jax.lax.all_gather(a.reshape(-1), "data") for a in arrays]
        lanes, exchanged = tpu.all_to_all_in_lanes(arrays, "data", 256), fused.all_to_all(arrays, "data")
        return [*zip(gathered, plain, strict=True), *zip(lanes, exchanged, strict=True)]

    for one, other in jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(*rows("uint8")):
        np.testing.assert_array_equal(one, other)
    words, scales, wide = (jax.ShapeDtypeStruct((512, n), jnp.uint8) for n in (256, 1, 2048))
    assert [tpu.width(of) for of in ([scales, words], [scales], [wide])] == [256, tpu.LANES, tpu.LANES]


def test_a_buffer_that_tpu_could_not_compile_is_in_lanes_whatever_its_rows() -> None:
    row = jax.ShapeDtypeStruct((2**13, 2**16), jnp.uint8)
    assert not tpu.pays_in_lanes([row, row]) and tpu.pays_in_lanes([row] * 3)


@pytest.mark.parametrize(
    ("lengths", "dtype", "expected"),
    [
        ((tpu.LONG,), jnp.uint8, True),
        ((tpu.LONG - 1,), jnp.uint8, False),
        ((tpu.LONG - 1,), jnp.uint16, False),
        ((tpu.LONG,), jnp.uint16, True),
        ((tpu.LONG, 1), jnp.uint16, True),
        ((tpu.LONG - 1,) * 3, jnp.uint8, False),
    ],
)
def test_only_long_rows_are_in_lanes_and_only_on_tpu(lengths: tuple[int, ...], dtype, expected: bool) -> None:
    mesh = AbstractMesh((N,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda *arrays: fused.all_to_all(arrays, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    shapes = [jax.ShapeDtypeStruct((N * N, n), dtype) for n in lengths]
    for platform in ("cpu", "cuda", "tpu"):
        text = jax.jit(mapped).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        assert text.count('"stablehlo.all_to_all"') == 1
        assert (f"x{tpu.LANES}xui" in text) == (expected and platform == "tpu")
