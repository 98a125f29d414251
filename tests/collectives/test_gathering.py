"""The forms of an all-gather: the same numbers and bytes, and on each platform the one that its compiler keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax.collectives import tpu

P = PartitionSpec
N = 8


def sent_by(kind: AxisType, check_vma: bool, gather) -> tuple[int, np.ndarray]:
    mesh = jax.make_mesh((N,), ("workers",), axis_types=(kind,))
    x = jax.device_put(np.arange(N * 10, dtype=np.uint16), jax.NamedSharding(mesh, P("workers")))
    mapped = jax.shard_map(gather, mesh=mesh, in_specs=P("workers"), out_specs=P(), check_vma=check_vma)
    compiled = jax.jit(mapped).lower(x).compile()
    return gc.wire_bytes(compiled).sent, np.asarray(compiled(x))


@pytest.mark.parametrize(("first", "kind", "check_vma"), [(4, AxisType.Explicit, True), (2, AxisType.Auto, False)])
def test_two_steps_gather_the_same_for_as_many_bytes(kind: AxisType, check_vma: bool, first: int) -> None:
    steps = sent_by(kind, check_vma, lambda x: tpu.in_two_steps(x, "workers", first))
    one = sent_by(kind, check_vma, lambda x: tpu.all_gather(x, "workers"))
    assert steps[0] == one[0] == (N - 1) * 10 * 2
    np.testing.assert_array_equal(steps[1], one[1])
    np.testing.assert_array_equal(one[1], np.arange(N * 10).reshape(N, 10))


def lowered_rows(platform: str, workers: int, entries: int) -> list[tuple[int, int]]:
    """Of a program lowered for a platform, without its devices or compiler: each all-gather's (group, operand bytes)."""
    mesh = AbstractMesh((workers,), ("workers",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda x: tpu.all_gather(x, "workers"), mesh=mesh, in_specs=P("workers"), out_specs=P())
    shape = jax.ShapeDtypeStruct((workers * entries,), jnp.uint8)
    text = jax.jit(mapped).trace(shape).lower(lowering_platforms=(platform,)).as_text(dialect="hlo")
    report = gc.wire_bytes(text)
    assert {row.kind for row in report.rows} == {"all-gather"}
    return [(row.group_size, row.operand_bytes) for row in report.rows]


@pytest.mark.parametrize(
    ("workers", "entries", "on_tpu"),
    [
        (16, 1000, [(16, 1024)]),
        (16, 1024, [(16, 1024)]),
        (16, 1, [(16, 128)]),
        (32, 256, [(32, 256)]),
        (64, 256, [(8, 256), (8, 8 * 256)]),
        (256, 1000, [(16, 1024), (16, 16 * 1024)]),
        (48, 128, [(6, 128), (8, 6 * 128)]),
        # A prime has no runs, and a large result is gathered in one step as it is.
        (67, 128, [(67, 128)]),
        (64, 2**18 + 128, [(64, 2**18 + 128)]),
    ],
)
def test_what_is_lowered_for_tpu_and_for_others(workers: int, entries: int, on_tpu: list[tuple[int, int]]) -> None:
    assert lowered_rows("tpu", workers, entries) == on_tpu
    assert lowered_rows("cpu", workers, entries) == [(workers, entries)]
    assert lowered_rows("cuda", workers, entries) == [(workers, entries)]


def test_many_simulated_workers_gather_under_vmap() -> None:
    """``vmap`` knows no groups of devices: 64 workers in a notebook take one step."""
    x = np.arange(64 * 10, dtype=np.uint8).reshape(64, 10)
    gather = jax.vmap(lambda x: tpu.all_gather(x, "workers"), axis_name="workers", out_axes=None)
    np.testing.assert_array_equal(jax.jit(gather)(x), x)
