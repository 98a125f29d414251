"""What the compiled program sends is what the payloads say, to the byte, and nothing dense besides."""

import functools
import math

import jax
import pytest

import gradcomp_jax as gc

from .environments import AXIS, WORKERS, environment, exchange_state
from .methods import METHODS, Case
from .test_conformance import COMPRESSED, SHAPES, gradients, parameters

N = WORKERS


def all_reduce(size: int) -> int:
    return math.ceil(2 * (N - 1) * size / N)


def rows_of(case: Case) -> tuple[list[int], list[int]]:
    """Rows of each compressed piece, and of the piece that holds the rest."""
    sizes = {name: math.prod(shape) for name, (shape, _) in SHAPES.items() if name != "empty"}
    chosen = list(sizes) if case.whole_tree else COMPRESSED
    rest = sum(size for name, size in sizes.items() if name not in chosen)
    return [-(-sizes[name] // case.wire[0].block) for name in chosen], [rest] if rest else []


def expected(case: Case) -> dict[str, int]:
    """Bytes sent by kind of collective, from the payloads of each part."""
    sent = {"all-to-all": 0, "all-gather": 0, "all-reduce": 0}
    for (compressor, route), rows in zip((case.wire, case.rest), rows_of(case), strict=True):
        if not rows:
            continue
        total, up = sum(rows), compressor.payload_bytes(1)
        share = -(-total // N)
        if route == "two_phase":
            sent["all-to-all"] += (N - 1) * share * up
            sent["all-gather"] += (N - 1) * share * compressor.back(N).payload_bytes(1)
        elif route == "gather":
            sent["all-gather"] += (N - 1) * total * up
        else:
            # This backend widens a bfloat16 all-reduce, which is why dense bfloat16 is not one by default.
            widened = 2 if compressor == gc.compressors.dense("bfloat16") else 1
            sent["all-reduce"] += all_reduce(total * up * widened)
        if compressor.agrees:
            statistic = jax.eval_shape(lambda: shared_statistic(compressor, rows))  # noqa: B023
            sent["all-reduce"] += all_reduce(statistic.size * 4)
    return sent


def shared_statistic(compressor, rows):
    import jax.numpy as jnp

    parts = [compressor.measure(jnp.zeros((r, compressor.block)), jnp.zeros((r,), jnp.int32)) for r in rows]
    return jnp.concatenate(parts)


@functools.cache
def compiled(method: str):
    world = environment("shard_map-auto-vma", METHODS[method].make(AXIS))
    params = parameters()
    return world.jitted.lower(gradients("normal"), world.init(params), params).compile()


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_the_payloads(method: str) -> None:
    report = gc.wire_bytes(compiled(method), branch=-1)
    sent = {kind: 0 for kind in ("all-to-all", "all-gather", "all-reduce")}
    for kind, row in report.by("kind").items():
        sent[kind] += row.sent
    want = expected(METHODS[method])
    for kind, size in sent.items():
        # The flag is one word of at most four bytes, in a collective that is there anyway.
        assert want[kind] <= size <= want[kind] + 4 * (N - 1), (kind, size, want)


@pytest.mark.parametrize("method", [m for m in METHODS if not m.startswith("dense")])
def test_no_dense_collective_of_a_compressed_leaf(method: str) -> None:
    smallest = min(math.prod(SHAPES[name][0]) for name in COMPRESSED)
    for row in gc.wire_bytes(compiled(method), branch=-1).rows:
        if row.dtype in ("f32", "f16", "bf16", "f64"):
            assert row.operand_bytes < smallest * 4, f"{row.name} moves a compressed leaf"


@pytest.mark.parametrize("method", METHODS)
def test_one_collective_for_all_leaves(method: str) -> None:
    for (kind, dtype), row in gc.wire_bytes(compiled(method), branch=-1).by("kind", "dtype").items():
        # Scales cross in an all-reduce of their own, before what they scale can be encoded.
        assert row.count <= (2 if kind == "all-reduce" else 1), (kind, dtype, row.count)


def test_state_is_what_the_method_needs() -> None:
    state = exchange_state(jax.eval_shape(gc.terngrad(axis_name=AXIS).init, parameters()))
    assert not jax.tree.leaves((state.memory, state.compressor, state.server))
