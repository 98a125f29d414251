"""What the compiled program sends is what the payloads say, to the byte, and nothing dense besides."""

import functools
import math

import jax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.methods.traffic import traffic_of
from tests.marks import slow_but

from .environments import AXIS, WORKERS, environment, exchange_state
from .methods import FEW, METHODS, Case
from .test_conformance import COMPRESSED, SHAPES, dealt_over, gradients, parameters, segments_of

N = WORKERS
KINDS = ("all-to-all", "all-gather", "all-reduce", "collective-permute")


def all_reduce(size: int) -> int:
    return math.ceil(2 * (N - 1) * size / N)


def groups_of(case: Case) -> list[tuple[gc.compressors.Compressor, str, list[int]]]:
    """Compressor, collective and the rows of each segment, of every group."""
    groups = []
    for members in segments_of(case)[:-1]:
        code = case.code(SHAPES[members[0][0]][0])
        sizes = [sum(math.prod(SHAPES[name][0]) for name in leaves) for leaves in members]
        rows = [-(-size // code.block) for size in sizes]
        rows = [dealt_over(case, leaves, n * code.block) or n for leaves, n in zip(members, rows, strict=True)]
        groups.append((code, case.wire[1], rows))
    for members in segments_of(case)[-1:]:
        rest = sum(math.prod(SHAPES[name][0]) for leaves in members for name in leaves)
        groups.append((*case.rest, [rest] if rest else []))
    return groups


def expected(case: Case) -> dict[str, int]:
    """Bytes sent by kind of collective, from the payloads of each group."""
    sent = dict.fromkeys(KINDS, 0)
    statistics, summed = 0, 0
    groups = [(*group, rows) for *group, rows in groups_of(case) if rows]
    phases = any(collective == "two_phase" for _, collective, _ in groups)
    for compressor, collective, rows in groups:
        if phases and compressor == gc.compressors.dense() and compressor is case.rest[0]:
            # What auto would add up by itself rides along.
            collective = "two_phase"
        total, uplink = sum(rows), compressor.payload_bytes(1)
        shard = -(-total // N)
        if collective == "two_phase":
            sent["all-to-all"] += (N - 1) * shard * uplink
            sent["all-gather"] += (N - 1) * shard * compressor.downlink(N).payload_bytes(1)
        elif collective == "all_gather":
            sent["all-gather"] += (N - 1) * total * uplink
        elif collective == "recursive_doubling":
            sent["collective-permute"] += sum(min(have * uplink, 4 * compressor.block) * total for have in (1, 2, 4))
        else:
            # This backend widens a bfloat16 all-reduce, which is why dense bfloat16 is not one by default.
            summed += total * uplink * (2 if compressor == gc.compressors.dense("bfloat16") else 1)
        if compressor.side_information in ("max", "mean"):
            # One for a tensor, or one for each of its rows.
            statistics += sum(compressor.statistic_spec(r).size * 4 for r in rows)
    sent["all-reduce"] = all_reduce(statistics) + all_reduce(summed)
    return sent


@functools.cache
def compiled(method: str):
    world = environment("shard_map-auto-vma", METHODS[method].make(AXIS))
    params = parameters()
    return world.jitted.lower(gradients("normal"), world.init(params), params).compile()


def described(method: str) -> dict[str, int]:
    """What the exchange says of itself."""
    traffic = traffic_of(METHODS[method].make(AXIS), parameters(), {AXIS: N})
    return dict.fromkeys(KINDS, 0) | {collective.kind: collective.sent for collective in traffic.collectives}


@pytest.mark.parametrize("method", slow_but(FEW, METHODS))
def test_bytes_are_the_payloads(method: str) -> None:
    report = gc.wire_bytes(compiled(method), branch=-1)
    sent = dict.fromkeys(KINDS, 0)
    for kind, row in report.by("kind").items():
        sent[kind] += row.sent
    case = METHODS[method]
    if case.wire:
        want = expected(case)
        for kind, size in sent.items():
            # The flag is one word of at most four bytes, in a collective that is there anyway.
            assert want[kind] <= size <= want[kind] + 4 * (N - 1), (kind, size, want)
    if method != "dense-bf16-sum":  # which this backend widens
        assert sent == described(method)


@pytest.mark.parametrize("method", slow_but(FEW, [m for m in METHODS if not m.startswith("dense")]))
def test_no_dense_collective_of_a_compressed_leaf(method: str) -> None:
    smallest = min(math.prod(SHAPES[name][0]) for name in COMPRESSED)
    for row in gc.wire_bytes(compiled(method), branch=-1).rows:
        if row.dtype in ("f32", "f16", "bf16", "f64"):
            assert row.operand_bytes < smallest * 4, f"{row.name} moves a compressed leaf"


@pytest.mark.parametrize("method", slow_but(FEW, METHODS))
def test_one_collective_for_all_leaves(method: str) -> None:
    report = gc.wire_bytes(compiled(method), branch=-1)
    assert not any(row.residuals for row in report.rows)
    for kind, row in report.by("kind").items():
        # What is data crosses in one buffer; sums keep their types. A doubling has its rounds.
        if kind != "all-reduce":
            assert row.count <= {"collective-permute": 3}.get(kind, 1), (kind, row.count)
    for (kind, dtype), row in report.by("kind", "dtype").items():
        # Scales cross in an all-reduce of their own, before what they scale can be encoded.
        assert kind != "all-reduce" or row.count <= 2, (dtype, row.count)


def test_state_is_what_the_method_needs() -> None:
    state = exchange_state(jax.eval_shape(gc.terngrad(axis_name=AXIS).init, parameters()))
    assert not jax.tree.leaves((state.memory, state.compressor, state.server))
