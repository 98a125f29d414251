"""What is lowered for each platform: CPU keeps its scatters, loops and barriers, and accelerators have none of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import kernels
from gradcomp_jax.kernels.selection import taken_by_comparing

ROWS, BLOCK = 6, 1024


def lowered(platform: str, function, *shapes: tuple[tuple[int, ...], jnp.dtype]) -> str:
    """The program as it is handed to the compiler of a platform that need not be there."""
    arguments = [jax.ShapeDtypeStruct(*s) for s in shapes]
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "is_cpu"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_up_to_sixteen_entries_are_compared_on_accelerators(platform: str, is_cpu: bool) -> None:
    def place(index, value):
        return kernels.place_in_rows(index, value, BLOCK), kernels.mark_in_rows(index, BLOCK)

    for k, expected in ((8, 0), (16, 2 if is_cpu else 0), (17, 2)):
        text = lowered(platform, place, ((ROWS, k), jnp.int32), ((ROWS, k), jnp.float32))
        assert text.count('"stablehlo.scatter"') == expected


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_up_to_sixteen_entries_are_taken_without_a_gather_on_tpu(platform: str) -> None:
    for k, expected in ((16, platform != "tpu"), (17, True)):
        text = lowered(platform, kernels.take_from_rows, ((ROWS, BLOCK), jnp.float32), ((ROWS, k), jnp.int32))
        assert ('"stablehlo.gather"' in text) == expected


def test_what_is_taken_by_comparing_is_there_to_the_bit() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(5, 64)).astype(np.float32)
    rows[0, :6] = [-0.0, np.nan, np.inf, -np.inf, np.float32(1e-45), 0.0]
    index = np.stack([random.permutation(64)[:6] for _ in range(5)]).astype(np.int32)
    index[0] = np.arange(6)
    taken = jax.jit(taken_by_comparing)(rows, index)
    expected = np.take_along_axis(rows, index, axis=1)
    np.testing.assert_array_equal(np.asarray(taken).view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(("platform", "is_cpu"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_digits_are_unpacked_without_a_barrier_on_accelerators(platform: str, is_cpu: bool) -> None:
    text = lowered(platform, lambda words: kernels.unpack_digits(words, BLOCK, 3), ((ROWS, 205), jnp.uint8))
    assert ("optimization_barrier" in text) == is_cpu


@pytest.mark.parametrize(("platform", "is_cpu"), [("cpu", True), ("cuda", False), ("tpu", False)])
@pytest.mark.parametrize("workers", [8, 20])
def test_a_few_payloads_are_added_without_a_loop_on_accelerators(platform: str, is_cpu: bool, workers: int) -> None:
    code = gc.compressors.topk(10 / BLOCK, block=BLOCK)

    def reduce(index, value):
        return code.reduce(type(code.payload_spec(1))(index, value))

    shape = (workers, ROWS, 10)
    text = lowered(platform, reduce, (shape, jnp.uint16), (shape, jnp.bfloat16))
    assert ("stablehlo.while" in text) == (is_cpu or workers > 8)
    assert ("stablehlo.scatter" in text) == is_cpu


@pytest.mark.parametrize("workers", [3, 8, 20])
def test_groups_of_payloads_are_added_in_the_order_of_a_loop(workers: int, monkeypatch) -> None:
    """Numbers are so unlike that another order rounds to another sum; each is weighted by its worker's parity."""
    monkeypatch.setattr(kernels, "on_cpu", lambda cpu, accelerator, *operands: accelerator(*operands))
    payloads = np.random.default_rng(0).normal(size=(workers, 500)) * 10.0 ** np.arange(workers)[:, None] / 1e5
    payloads = payloads.astype(np.float32)

    def one(payload, i):
        return payload * jnp.where(jnp.asarray(i, jnp.int32) % 2 == 0, jnp.float32(1), jnp.float32(2))

    total = jax.jit(lambda p: gc.compressors.base.add_up(one, p))(payloads)
    expected = payloads[0]
    for i in range(1, workers):
        expected = expected + payloads[i] * np.float32(1 + i % 2)
    np.testing.assert_array_equal(total, expected)
