"""Faults that the assertion must catch, in programs without a method of ours, and programs in which it must see none."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from gradcomp_jax.audit.limits import SMALL, element_type
from gradcomp_jax.testing import assert_wire

N, SHAPE, ENTRIES = 8, (64, 128), 64 * 128
SENT = 2 * (N - 1) * ENTRIES // N
"""Bytes that a device sends in an all-reduce of the matrix with one byte an entry."""


@pytest.fixture
def lines() -> Iterator[None]:
    """Source lines in programs, which the tests' environment leaves out, and none of another program from the cache."""
    names = {"jax_traceback_in_locations_limit": 10, "jax_compilation_cache_include_metadata_in_key": True}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def array(mesh, *shape, along=None, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, P(along)))


def matrix_and_batch(mesh, along=None):
    return array(mesh, *SHAPE, along=along), array(mesh, 16, SHAPE[0], along="data")


def under_shard_map(mesh, worker, *arrays):
    specs = tuple(a.sharding.spec for a in arrays)
    mapped = jax.shard_map(worker, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile()


def squares(w, x):
    return jnp.mean((x @ w) ** 2)


def test_a_bfloat16_all_reduce_that_runs_in_float32(mesh8) -> None:
    """XLA:CPU widens what it adds up; the mean of a loss may be float32."""

    def worker(g, x):
        return jax.lax.psum(g.astype(jnp.bfloat16), "data").astype(jnp.float32) + jax.lax.pmean(x.mean(), "data")

    compiled = under_shard_map(mesh8, worker, *matrix_and_batch(mesh8))
    # With the loss, which the compiler adds up in the same operation.
    with pytest.raises(AssertionError, match=rf"dtype f32: {4 * SENT + 7:,} bytes; expected bf16") as caught:
        assert_wire(compiled, axis="data", dtypes="bfloat16")
    assert "all-reduce  f32" in str(caught.value)
    assert_wire(compiled, axis="data", dtypes=("bfloat16", jnp.float32), kinds="all-reduce", at_most=4 * SENT + 64)


def test_a_gradient_that_is_reduced_twice_names_both_lines(mesh8, lines) -> None:
    def worker(w, x):
        gradient = jax.lax.pmean(jax.grad(squares)(w, x), "data")
        norm = jnp.linalg.norm(gradient)
        return w - jax.lax.pmean(gradient / norm, "data")

    compiled = under_shard_map(mesh8, worker, *matrix_and_batch(mesh8))
    with pytest.raises(AssertionError) as caught:
        assert_wire(compiled, at_most=4 * SENT)
    sentence, header, *rows = str(caught.value).splitlines()
    assert sentence == f"one device sends {8 * SENT:,} bytes; expected at most {4 * SENT:,}"
    assert header.split() == ["axis", "kind", "dtype", "devices", "count", "bytes", "sent", "line"]
    first = worker.__code__.co_firstlineno
    assert sorted(row.split()[-1].rpartition("/")[2] for row in rows) == [
        f"test_assert_wire.py:{first + 1}",
        f"test_assert_wire.py:{first + 3}",
    ]
    assert all(row.startswith("data  all-reduce  f32          8      1") for row in rows)
    assert_wire(compiled, at_most=8 * SENT)


def test_a_residual_of_ones_own_that_crosses(mesh8) -> None:
    """An error feedback by hand, of which the caller pins what each worker keeps: an all-gather appears."""

    def worker(w, kept, x):
        target = jax.grad(squares)(w, x) + kept[0]
        sent = target.astype(jnp.int8)
        return w - jax.lax.psum(sent, "data").astype(jnp.float32), (target - sent.astype(jnp.float32))[None]

    specs = (P(), P("data"))
    mapped = jax.shard_map(worker, mesh=mesh8, in_specs=(*specs, P("data")), out_specs=specs, check_vma=False)

    def step(w, kept, x):
        w, kept = mapped(w, kept, x)
        return w, jax.lax.with_sharding_constraint(kept, NamedSharding(mesh8, P()))

    w, x = matrix_and_batch(mesh8)
    compiled = jax.jit(step).lower(w, array(mesh8, N, *SHAPE, along="data"), x).compile()
    with pytest.raises(AssertionError, match=f"dtype f32: {4 * (N - 1) * ENTRIES:,} bytes; expected s8"):
        assert_wire(compiled, axis="data", dtypes="int8")
    with pytest.raises(AssertionError, match=r"kind all-gather: .* expected all-reduce"):
        assert_wire(compiled, axis="data", kinds="all-reduce")
    assert_wire(compiled, axis="data", dtypes=("int8", "float32"))


@pytest.mark.slow
def test_parameters_that_are_gathered_before_they_are_cast(mesh8) -> None:
    """jax#23543."""

    def forward(w, x):
        whole = jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), NamedSharding(mesh8, P()))
        return (x.astype(jnp.bfloat16) @ whole).sum()

    compiled = jax.jit(forward).lower(*matrix_and_batch(mesh8, along="data")).compile()
    with pytest.raises(AssertionError, match=f"dtype f32: {4 * (N - 1) * ENTRIES // N:,} bytes; expected bf16"):
        assert_wire(compiled, axis="data", dtypes="bfloat16", kinds="all-gather")


@pytest.mark.slow
def test_a_gradient_that_is_reduced_before_it_is_cast(mesh8) -> None:
    """jax#27496, in float16, which XLA:CPU does not widen: the partitioner adds up what the backward pass computes."""

    def step(w, x):
        return w - jax.grad(squares)(w.astype(jnp.float16), x.astype(jnp.float16)).astype(jnp.float32)

    compiled = jax.jit(step).lower(*matrix_and_batch(mesh8)).compile()
    with pytest.raises(AssertionError, match=rf"dtype f16: {2 * SENT:,} bytes; expected f32"):
        assert_wire(compiled, axis="data", dtypes="float32")


@pytest.mark.slow
def test_micro_batches_that_are_each_reduced(mesh8) -> None:
    """An all-reduce in a loop counts with its turns."""

    def worker(w, x):
        def turn(total, part):
            return total + jax.lax.pmean(jax.grad(squares)(w, part), "data"), None

        return w - jax.lax.scan(turn, jnp.zeros_like(w), x.reshape(2, 1, -1))[0]

    compiled = under_shard_map(mesh8, worker, *matrix_and_batch(mesh8))
    with pytest.raises(AssertionError, match=f"one device sends {8 * SENT:,} bytes along data"):
        assert_wire(compiled, axis="data", at_most=1.5 * 4 * SENT)


# An all-gather of 1,000 entries of 16 bits from each of 16 chips, as libtpu 0.0.42.1 compiles it for a v5e 4x4: hints of the
# compiler to itself are left out, and so are the lines that add 16 bits in words of 32.
TPU = """\
HloModule jit_payload, is_scheduled=true, entry_computation_layout={(u16[1000]{0})->u16[16,1000]{1,0}}, num_partitions=16

FileNames
1 "/home/me/train.py"

FunctionNames
1 "<module>"
2 "payload"

FileLocations
1 {file_name_id=1 function_name_id=1 line=11 end_line=11 column=4 end_column=4}
2 {file_name_id=1 function_name_id=2 line=9 end_line=9 column=23 end_column=23}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %main.0_spmd (param.1: u16[1000]) -> u16[16,1000] {
  %constant.4 = u16[]{:T(256)} constant(0)
  %param.1 = u16[1000]{0:T(1024)(128)(2,1)} parameter(0), sharding={devices=[16]<=[16]}, metadata={op_name="x"}
  %at = u32[]{:T(128)S(6)} partition-id()
  %broadcast = u16[16000]{0:T(1024)(128)(2,1)S(1)} broadcast(%constant.4), dimensions={}
  %update = u16[16000]{0:T(1024)(128)(2,1)S(1)} dynamic-update-slice(%broadcast, %param.1, %at)
  %custom-call = u16[16384]{0:T(1024)(128)(2,1)S(1)} custom-call(%update), custom_call_target="ZeroCrop"
  %bitcast.2 = u32[64,1,128]{2,1,0:T(1,128)S(1)} bitcast(%custom-call)
  %all-reduce = u32[64,1,128]{2,1,0:T(1,128)S(1)} all-reduce(%bitcast.2), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, use_global_device_ids=true, to_apply=%add.clone
  %bitcast.3 = u16[16000]{0:T(1024)(128)(2,1)S(1)} bitcast(%all-reduce)
  ROOT %reshape = u16[16,1000]{1,0:T(8,128)(2,1)} reshape(%bitcast.3), \
metadata={op_name="jit(payload)/shard_map/all_gather" stack_frame_id=2}
}
"""


def test_an_all_gather_that_became_an_all_reduce_on_tpu() -> None:
    """Twice the bytes, and the line is that of what reads it: the compiler's own all-reduce has none."""
    mesh = jax.sharding.AbstractMesh((4, 4), ("slow", "fast"))
    with pytest.raises(AssertionError) as caught:
        assert_wire(TPU, axis="slow", kinds="all-gather", mesh=mesh)
    sentence, _, row = str(caught.value).splitlines()
    assert sentence == "kind all-reduce: 61,440 bytes; expected all-gather"
    words = ["slow,", "fast", "all-reduce", "u32", "16", "1", "61,440", "kind", "/home/me/train.py:9"]
    assert row.split() == words
    with pytest.raises(AssertionError, match=r"one device sends 61,440 bytes; expected at most 30,000"):
        assert_wire(TPU, at_most=2 * 15 * 1000)


def reduced(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, is_scheduled=true, num_partitions=8\n\nENTRY %e (x: f32[4096]) -> f32[4096] {{\n{body}\n}}\n"


X = "%x = f32[4096] parameter(0)"


def test_only_collectives_along_the_axis_are_looked_at() -> None:
    text = reduced(
        X,
        "%a = f32[4096] all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true",
        "%b = f32[4096] all-reduce(%a), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true",
        "ROOT %c = f32[4096] all-reduce(%b), channel_id=1, replica_groups={{0,1,2},{3,4,5,6,7}}, use_global_device_ids=true",
    )
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    along, unknown = 4096 * 4, -(-2 * 4 * 4096 * 4 // 5)
    with pytest.raises(AssertionError, match=f"one device sends {along + unknown:,} bytes along data") as caught:
        assert_wire(text, axis="data", at_most=1, mesh=mesh)
    assert [row.split()[0] for row in str(caught.value).splitlines()[2:]] == ["{0,1,2},", "data"]
    assert_wire(text, axis="data", at_most=along + unknown, mesh=mesh)
    report = gc.wire_bytes(text, mesh=mesh)
    assert_wire(report, axis=("data", "model"), at_most=report.sent)
    with pytest.raises(ValueError, match="did you mean 'data'"):
        assert_wire(report, axis="dta")
    with pytest.raises(ValueError, match="does not say where 'data' is: give the mesh"):
        assert_wire(text, axis="data")
    with pytest.raises(ValueError, match=r"pass mesh= to gradcomp_jax\.wire_bytes"):
        assert_wire(report, mesh=mesh)


@pytest.mark.parametrize(("leaves", "entries", "alarm"), [(1, SMALL // 4, False), (2, SMALL // 4, True)])
def test_what_is_small_in_all_is_free_but_for_its_bytes(leaves: int, entries: int, alarm: bool) -> None:
    every = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
    parts = [f"%s.{i} = f32[{entries}] all-reduce(%y), {every}" for i in range(leaves)]
    text = reduced(X, f"%y = f32[{entries}] slice(%x)", *parts, "ROOT %r = f32[4096] copy(%x)")
    if alarm:
        with pytest.raises(AssertionError, match="dtype f32"):
            assert_wire(text, dtypes="bf16")
    else:
        assert_wire(text, dtypes="bf16", kinds="all-gather")
    with pytest.raises(AssertionError, match="expected at most 8"):
        assert_wire(text, at_most=8)


def test_names_of_dtypes_and_kinds() -> None:
    names = [
        "bfloat16",
        "int8",
        "uint16",
        "bool",
        "float8_e4m3fn",
        "complex64",
        "float4_e2m1fn",
        "int4",
        "bf16",
        "pred",
    ]
    theirs = ["bf16", "s8", "u16", "pred", "f8e4m3fn", "c64", "f4e2m1fn", "s4", "bf16", "pred"]
    assert list(map(element_type, names)) == theirs
    assert element_type(jnp.bfloat16) == element_type(jnp.dtype("bfloat16")) == "bf16"
    for wrong in ("i8", "f8", "half", "bfloat"):
        with pytest.raises(ValueError, match=f"unknown dtype '{wrong}': write it as JAX does"):
            assert_wire(TPU, dtypes=wrong)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="at_most must be bytes, at least 0"):
            assert_wire(TPU, at_most=wrong)
    assert_wire(TPU, kinds="all_reduce")
    with pytest.raises(ValueError, match="unknown kind 'all-gathre'; did you mean 'all-gather'"):
        assert_wire(TPU, kinds="all-gathre")
