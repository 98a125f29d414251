"""How much of what an exact selection of a whole tensor would send a selection of blocks sends, of tensors with structure."""

import math

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import kernels
from gradcomp_jax.methods.traffic import traffic_of

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return 1e-3 * RNG.standard_normal(shape)


def with_rows(rows: int, width: int, hot: int) -> np.ndarray:
    x = noise(rows, width)
    x[RNG.choice(rows, hot, replace=False)] += RNG.standard_normal((hot, width))
    return x


def with_period(shape: tuple[int, ...], period: int, hot: int) -> np.ndarray:
    x = noise(int(np.prod(shape)) // period, period)
    x[:, :hot] += RNG.standard_normal((len(x), hot))
    return x.reshape(shape)


TENSORS = {
    "embedding": with_rows(8192, 64, 64),
    "zipf": RNG.standard_normal((8192, 64)) / (1 + RNG.permutation(8192))[:, None],
    "hot rows": with_rows(1024, 512, 8),
    "hot columns": with_period((1024, 1024), 1024, 8),
    "hot columns of a page": with_period((512, 1024), 512, 4),
    "a hot head": with_period((64, 16, 512), 16 * 512, 512),
    "lognormal": np.exp(RNG.standard_normal((512, 512))) * RNG.choice([-1, 1], (512, 512)),
    "stride of 64": with_period((512, 512), 64, 1),
    "odd sides": with_rows(301, 333, 3),
    "a small one": with_rows(64, 64, 1),
    "a kernel": with_rows(9, 64 * 64, 1).reshape(3, 3, 64, 64),
}


@pytest.mark.parametrize(
    ("method", "name", "density", "least"),
    [
        ((gc.topk_sgd, gc.gradient_dropping)[number % 2], name, *((0.001, 0.75), (0.01, 0.9))[number % 3 == 0])
        for number, name in enumerate(TENSORS)
    ],
)
def test_most_of_the_energy_is_sent(method, name: str, density: float, least: float) -> None:
    """Of one step without a memory; entries of a tensor with structure are where stretches would miss them."""
    x = TENSORS[name].astype(np.float32)
    tx = method(axis_name=None, density=density, block=1024, dtype="float32", mask=True)
    sent, _ = jax.jit(lambda x: tx.update(x, tx.init(x)))(x)
    wanted = np.sort(np.square(x.reshape(-1)))[::-1][: max(1, round(density * x.size))].sum()
    assert np.square(sent).sum() >= least * wanted


@pytest.mark.parametrize(("block", "k"), [(1024, 10), (4096, 64)])
@pytest.mark.parametrize("structure", ["stride of 64", "one hot row", "smooth"])
def test_a_block_with_structure(structure: str, block: int, k: int) -> None:
    """Entries of a row that lie a power of two apart, next to each other, or among the low frequencies of a chunk."""
    x = noise(32, block)
    if structure == "stride of 64":
        x[:, 5::64] += RNG.standard_normal((32, block // 64))
    elif structure == "one hot row":
        x[:, block // 2 : block // 2 + block // 16] += RNG.standard_normal((32, block // 16))
    else:
        side = round(block**0.5)
        x = RNG.standard_normal((32, block)) * np.outer(1 / (1 + np.arange(side)), 1 / (1 + np.arange(side))).reshape(
            -1
        )
    index = np.asarray(jax.jit(kernels.top_of_rows, static_argnums=1)(np.asarray(x, np.float32), k))
    assert all(len(set(row)) == k for row in index)
    sent = np.square(np.take_along_axis(x, index, axis=1)).sum()
    assert sent >= 0.9 * np.sort(np.square(x), axis=1)[:, -k:].sum()


@pytest.mark.parametrize("method", [gc.topk_sgd, gc.dgc])
def test_exact_is_the_papers_selection(method) -> None:
    """The largest of each tensor as a whole, and no other; what is not sent stays."""
    x = {name: np.asarray(TENSORS[name], np.float32) for name in ("odd sides", "a small one", "a kernel")}
    tx = method(axis_name=None, density=0.01, dtype="float32", exact=True)
    sent, _ = jax.jit(lambda x: tx.update(x, tx.init(x)))(x)
    for name, gradient in x.items():
        size = np.abs(np.asarray(gradient).reshape(-1))
        k = round(0.01 * size.size)
        wanted = np.where(size >= np.sort(size)[-k], np.asarray(gradient).reshape(-1), 0)
        np.testing.assert_array_equal(np.asarray(sent[name]).reshape(-1), wanted)
    with pytest.raises(ValueError, match="exact=True takes whole tensors as blocks, got block=1024"):
        method(axis_name=None, exact=True, block=1024)


@pytest.mark.parametrize("shape", [(1024, 1024), (1030, 1024), (1280, 1280), (4096, 1024), (5000, 2001)])
def test_exact_sends_the_density_asked_for(shape: tuple[int, int]) -> None:
    """Of tensors of several blocks too, whatever is left over of the last one."""
    tx = gc.topk_sgd(axis_name="data", density=0.01, dtype="float32", exact=True, collective="all_gather")
    sent = traffic_of(tx, {"w": jax.ShapeDtypeStruct(shape, np.float32)}, {"data": 2}).sent
    blocks = -(-math.prod(shape) // 2**20)
    assert abs(sent / 8 - 0.01 * math.prod(shape)) <= blocks  # a block's entries are rounded
