"""The audit of programs compiled here for eight CPU devices, against the formulas."""

import functools
import json
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gradcomp_jax.audit import wire_bytes

N = 8
AUTO = jax.sharding.AxisType.Auto
# What a CPU program holds in place of a type, where it widens it before the wire.
ON_CPU_WIRE = {
    "float32": ("f32", 4),
    "bfloat16": ("f32", 4),
    "float16": ("f16", 2),
    "float8_e4m3fn": ("f16", 2),
    "int8": ("s8", 1),
    "uint16": ("u16", 2),
    "int32": ("s32", 4),
    "int4": ("s8", 1),
    "complex64": ("c64", 8),
    "bool": ("pred", 1),
}


def make_mesh(*sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(AUTO,) * len(sizes))


def compile_on(mesh, f, *shapes, specs=None):
    """Compiles f under shard_map; each argument is split over all devices on its first axis."""
    everything = P(tuple(mesh.axis_names))
    specs = (everything,) * len(shapes) if specs is None else specs
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=everything, check_vma=False)
    return jax.jit(mapped).lower(*shapes).compile()


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def only_row(report):
    assert len(report.rows) == 1, report.rows
    return report.rows[0]


# One device holds int8[8, 6] or the like: 48 elements.
KINDS = {
    "all-reduce": (lambda x: jax.lax.psum(x, "w"), Fraction(2 * 7, 8)),
    "all-gather": (lambda x: jax.lax.all_gather(x, "w", tiled=True)[:8], Fraction(7)),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "w", tiled=True), Fraction(7, 8)),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "w", 0, 0, tiled=True), Fraction(7, 8)),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "w", [(i, (i + 1) % N) for i in range(N)]), Fraction(1)),
}
CASES = [
    *(("all-reduce", "float32"), ("all-reduce", "bfloat16"), ("all-gather", "int8"), ("reduce-scatter", "int32")),
    *(("all-to-all", "bool"), ("collective-permute", "uint16"), ("all-gather", "float8_e4m3fn")),
    *(("all-gather", "int4"), ("all-reduce", "complex64")),
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_bytes_follow_the_formula(kind, dtype):
    f, factor = KINDS[kind]
    mesh = make_mesh(N, names=("w",))
    row = only_row(wire_bytes(compile_on(mesh, f, array(64, 6, dtype=dtype)), mesh=mesh))
    hlo_type, size = ON_CPU_WIRE[dtype]
    assert (row.kind, row.dtype, row.axis, row.group_size) == (kind, hlo_type, ("w",), N)
    assert row.operand_bytes == 48 * size
    assert row.sent_bytes == row.received_bytes == math.ceil(factor * 48 * size)
    assert row.groups == (tuple(range(N)),)


def test_a_fraction_that_is_not_whole_is_rounded_up():
    mesh = make_mesh(N, names=("w",))
    report = wire_bytes(compile_on(mesh, lambda x: jax.lax.psum(x, "w"), array(8, 3, dtype="int8")))
    # 2 * 7 / 8 of 3 bytes is 5.25 bytes.
    assert (report.sent, report.operand) == (6, 3)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("b", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("a", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (("a", "b"), (tuple(range(8)),)),
        (("b", "a"), (tuple(range(8)),)),
    ],
)
def test_the_axis_of_a_nested_mesh_is_named(names, groups):
    mesh = make_mesh(2, 4, names=("a", "b"))
    compiled = compile_on(mesh, lambda x: jax.lax.psum(x, names), array(8, 5))
    row = only_row(wire_bytes(compiled, mesh=mesh))
    assert row.groups == groups
    assert row.axis == tuple(sorted(names))
    n = len(groups[0])
    assert row.sent_bytes == math.ceil(Fraction(2 * (n - 1), n) * 20)
    assert only_row(wire_bytes(compiled)).axis is None


def test_axes_of_three_that_are_not_next_to_one_another():
    mesh = make_mesh(2, 2, 2, names=("x", "y", "z"))
    compiled = compile_on(mesh, lambda x: jax.lax.all_gather(x, ("z", "x"))[0], array(8, 5))
    row = only_row(wire_bytes(compiled, mesh=mesh))
    assert (row.axis, row.group_size, row.sent_bytes) == (("x", "z"), 4, 3 * 20)


def test_axes_count_positions_and_not_hardware_ids():
    devices = jax.devices()
    order = [devices[i] for i in (3, 1, 7, 5, 0, 2, 4, 6)]
    mesh = jax.sharding.Mesh(np.array(order).reshape(2, 4), ("a", "b"))
    row = only_row(wire_bytes(compile_on(mesh, lambda x: jax.lax.psum(x, "b"), array(8, 5)), mesh=mesh))
    assert (row.axis, row.groups) == (("b",), ((0, 1, 2, 3), (4, 5, 6, 7)))


def test_an_axis_of_size_one_is_not_named():
    mesh = make_mesh(1, 8, names=("one", "w"))
    compiled = compile_on(mesh, lambda x: jax.lax.psum(x, ("one", "w")), array(8, 5))
    assert only_row(wire_bytes(compiled, mesh=mesh)).axis == ("w",)


def test_groups_that_follow_no_axis_have_none():
    mesh = make_mesh(2, 4, names=("a", "b"))

    def f(x):
        return jax.lax.psum(x, "w", axis_index_groups=[[0, 1, 2, 4, 7], [3, 5, 6]])

    flat = make_mesh(8, names=("w",))
    row = only_row(wire_bytes(compile_on(flat, f, array(8, 5)), mesh=mesh))
    # Groups of unequal size count as the largest: 2 * 4 / 5 of 20 bytes.
    assert (row.axis, row.group_size, row.sent_bytes) == (None, 5, 32)


def test_a_program_that_is_not_compiled_yet_has_axes_too():
    """Its text does not say how many devices it is for."""
    mesh = make_mesh(2, 4, names=("a", "b"))
    mapped = jax.shard_map(lambda x: jax.lax.psum(x, "b"), mesh=mesh, in_specs=P(("a", "b")), out_specs=P("a"))
    text = jax.jit(mapped).lower(array(8, 5)).as_text(dialect="hlo")
    row = only_row(wire_bytes(text, mesh=mesh))
    assert (row.axis, row.group_size, row.sent_bytes) == (("b",), 4, 30)


def test_a_mesh_of_another_size_is_refused():
    mesh = make_mesh(N, names=("w",))
    compiled = compile_on(mesh, lambda x: jax.lax.psum(x, "w"), array(8, 5))
    four = jax.make_mesh((4,), ("w",), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="mesh has 4 devices but the program runs on 8"):
        wire_bytes(compiled, mesh=four)


def test_an_axis_of_one_device_moves_nothing():
    mesh = make_mesh(1, 8, names=("one", "w"))
    compiled = compile_on(mesh, lambda x: jax.lax.ppermute(x, "one", [(0, 0)]), array(8, 5))
    assert wire_bytes(compiled).sent == 0


def test_a_permute_counts_the_most_that_any_device_sends():
    mesh = make_mesh(2, 4, names=("a", "b"))
    chain = compile_on(mesh, lambda x: jax.lax.ppermute(x, "b", [(0, 0), (1, 3)]), array(8, 5))
    row = only_row(wire_bytes(chain, mesh=mesh))
    assert (row.sent_bytes, row.axis, row.count) == (20, ("b",), 1)
    still = compile_on(mesh, lambda x: jax.lax.ppermute(x, "b", [(0, 0), (1, 1)]), array(8, 5))
    assert wire_bytes(still, mesh=mesh).sent == 0


def test_a_tuple_is_counted_by_dtype():
    mesh = make_mesh(N, names=("w",))

    def f(x):
        tree = (x, x[:, :3] + 1.0, x.astype(jnp.int8))
        a, b, c = jax.lax.psum(tree, "w")
        return jnp.concatenate([a, b, c.astype(jnp.float32)], axis=1)

    report = wire_bytes(compile_on(mesh, f, array(8, 64)))
    sums = report.by("dtype")
    assert sums["f32"].operand == (64 + 3) * 4
    assert sums["f32"].sent == math.ceil(Fraction(7, 4) * 67 * 4)
    assert sums["s8"].sent == 7 * 64 // 4
    assert report.sent == sums["f32"].sent + sums["s8"].sent


def test_a_scan_multiplies_by_its_length():
    mesh = make_mesh(N, names=("w",))

    def f(x):
        def inner(c, _):
            return jax.lax.pmean(jnp.sin(c), "w"), None

        def outer(c, _):
            c, _ = jax.lax.scan(inner, c, None, length=3)
            return jax.lax.ppermute(c, "w", [(0, 1), (1, 0)]), None

        return jax.lax.scan(outer, x, None, length=7)[0]

    report = wire_bytes(compile_on(mesh, f, array(8, 64)))
    sums = report.by("kind")
    assert (sums["all-reduce"].count, sums["all-reduce"].sent) == (21, 21 * 7 * 64)
    assert (sums["collective-permute"].count, sums["collective-permute"].sent) == (7, 7 * 256)


def _until_converged(x):
    return jax.lax.while_loop(lambda c: c[0, 0] < 3.0, lambda c: jax.lax.pmean(jnp.exp(c), "w"), x)


def test_an_unknown_trip_count_is_asked_for():
    mesh = make_mesh(N, names=("w",))
    compiled = compile_on(mesh, _until_converged, array(8, 64))
    with pytest.raises(ValueError, match="pass trip_count="):
        wire_bytes(compiled)
    assert wire_bytes(compiled, trip_count=5).sent == 5 * 7 * 64
    assert wire_bytes(compiled, trip_count=0).sent == 0


def test_a_condition_that_communicates_runs_once_more_than_the_body():
    mesh = make_mesh(N, names=("w",))

    def f(x):
        return jax.lax.while_loop(lambda c: jax.lax.psum(c[0, 0], "w") < 3.0, lambda c: jnp.exp(c), x)

    # 2 * 7 / 8 of 4 bytes, 5 + 1 times.
    assert wire_bytes(compile_on(mesh, f, array(8, 64)), trip_count=5).sent == 6 * 7


def test_a_loop_of_at_most_one_turn_is_a_conditional():
    mesh = make_mesh(N, names=("w",))

    def f(x):
        go = jax.lax.psum(x[0, 0], "w") < 3.0
        body = lambda c: (jnp.zeros((), bool), jax.lax.pmean(jnp.exp(c[1]), "w"))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0], body, (go, x))[1]

    lowered = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("w"), out_specs=P("w"), check_vma=False)).lower(
        array(8, 64)
    )
    for program in (lowered.as_text(dialect="hlo"), lowered.compile()):
        assert [wire_bytes(program, branch=b).sent for b in ("max", "min", 0, 1)] == [455, 7, 7, 455]
        (choice,) = wire_bytes(program, trip_count=1000).conditionals
        assert (choice.sent, choice.chosen, choice.count) == ((0, 448), 1, 1)


def test_an_unknown_loop_without_a_collective_is_free():
    mesh = make_mesh(N, names=("w",))

    def f(x):
        return jax.lax.while_loop(lambda c: c[0, 0] < 3.0, jnp.exp, x)

    assert wire_bytes(compile_on(mesh, f, array(8, 64))).rows == ()


BRANCH_BYTES = (0, 7 * 64, 7 * 8)  # all-reduces of nothing, 256 and 32 bytes


@functools.cache
def _switch():
    mesh = make_mesh(N, names=("w",))

    def f(x, i):
        branches = [
            lambda x: x,
            lambda x: jax.lax.psum(x, "w"),
            lambda x: jnp.tile(jax.lax.psum(x[:, :8], "w"), (1, 8)),
        ]
        return jax.lax.switch(i[0], branches, x)

    shapes = (array(8, 64), array(1, dtype="int32"))
    return compile_on(mesh, f, *shapes, specs=(P("w"), P()))


@pytest.mark.parametrize(
    ("branch", "chosen"), [("max", 1), ("min", 0), (0, 0), (1, 1), (2, 2), (-1, 2), (-3, 0), (5, 1)]
)
def test_branches_are_alternatives(branch, chosen):
    report = wire_bytes(_switch(), branch=branch)
    assert report.sent == BRANCH_BYTES[chosen]
    (choice,) = report.conditionals
    assert (choice.sent, choice.chosen, choice.count) == (BRANCH_BYTES, chosen, 1)


@pytest.mark.parametrize(("branch", "sent"), [(1, 7 * 64), (0, 7 * 8)])
def test_the_true_branch_of_a_cond_is_number_one(branch, sent):
    mesh = make_mesh(N, names=("w",))

    def f(x, p):
        return jax.lax.cond(
            p[0], lambda x: jax.lax.psum(x, "w"), lambda x: jnp.tile(jax.lax.psum(x[:, :8], "w"), (1, 8)), x
        )

    shapes = (array(8, 64), array(1, dtype="bool"))
    compiled = compile_on(mesh, f, *shapes, specs=(P("w"), P()))
    assert wire_bytes(compiled, branch=branch).sent == sent


def test_a_program_without_collectives_moves_nothing():
    report = wire_bytes(jax.jit(lambda x: jnp.sin(x) @ x.T).lower(array(8, 8)).compile())
    assert (report.sent, report.received, report.operand, report.rows) == (0, 0, 0, ())
    assert str(report) == "no bytes cross between devices"


def test_collectives_that_the_partitioner_inserts_are_counted():
    mesh = make_mesh(2, 4, names=("a", "b"))

    def sharded(shape, *spec):
        sharding = jax.sharding.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    compiled = (
        jax.jit(jnp.matmul, out_shardings=jax.sharding.NamedSharding(mesh, P("a")))
        .lower(sharded((8, 64), "a", "b"), sharded((64, 32), "b"))
        .compile()
    )
    row = only_row(wire_bytes(compiled, mesh=mesh))
    assert (row.kind, row.axis, row.operand_bytes) == ("all-reduce", ("b",), 4 * 32 * 4)


def test_pmap_is_counted_like_shard_map():
    compiled = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i").lower(array(8, 64)).compile()
    row = only_row(wire_bytes(compiled))
    assert (row.group_size, row.sent_bytes) == (8, 7 * 64)


def test_the_report_prints_aligned_and_becomes_json():
    report = wire_bytes(_switch())
    header, line, total, choice = str(report).splitlines()
    assert line.split() == ["all-reduce", "f32", "-", "8", "1", "256", "448", "448"]
    end = header.index("sent") + len("sent")
    assert line[:end].endswith(" 448") and total[:end].endswith(" 448")
    assert choice.endswith("branches send 0, 448, 56; counted: 1")
    values = json.loads(json.dumps(report.to_dict()))
    assert (values["sent"], values["rows"][0]["kind"]) == (448, "all-reduce")
    assert values["conditionals"][0]["sent"] == [0, 448, 56]
    assert "psum" in report.rows[0].op_name


def test_the_most_expensive_line_comes_first():
    mesh = make_mesh(N, names=("w",))

    def f(x):
        def step(c, _):
            return jax.lax.ppermute(c, "w", [(0, 1)]), None

        few = jax.lax.scan(step, x[:, :2], None, length=3)[0]
        return jnp.tile(few, (1, 32)) + jax.lax.psum(x, "w")

    _, first, second, _ = str(wire_bytes(compile_on(mesh, f, array(8, 64)))).splitlines()
    assert first.split()[0] == "all-reduce" and second.split()[0] == "collective-permute"


def test_by_names_the_fields_it_knows():
    report = wire_bytes(_switch())
    assert report.by("kind", "dtype") == {("all-reduce", "f32"): report.by("kind")["all-reduce"]}
    with pytest.raises(ValueError, match="group_size"):
        report.by("size")
    with pytest.raises(ValueError, match="takes fields"):
        report.by()


@pytest.mark.parametrize("arguments", [{"branch": "most"}, {"branch": True}, {"branch": 1.0}])
def test_a_branch_must_be_known(arguments):
    with pytest.raises(ValueError, match="branch must be"):
        wire_bytes(_switch(), **arguments)


@pytest.mark.parametrize("trips", [-1, 2.5])
def test_a_trip_count_must_be_a_count(trips):
    with pytest.raises(ValueError, match="trip_count must be"):
        wire_bytes(_switch(), trip_count=trips)


def test_what_is_not_compiled_is_refused():
    lowered = jax.jit(jnp.sin).lower(array(8))
    with pytest.raises(ValueError, match="compile"):
        wire_bytes(lowered)
    with pytest.raises(ValueError, match="compile"):
        wire_bytes(jnp.sin)
