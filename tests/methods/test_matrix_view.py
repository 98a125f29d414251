"""Which matrices PowerSGD sees in a tensor: what each view keeps and sends, and a replay of stacked ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.core import by_matrix
from gradcomp_jax.core.matrix_view import even_split
from tests.conformance.environments import environment, exchange_state, vmapped

from .replay.power_iteration import PowerSgd
from .replay.workers import AXIS, N, close, mapped

RANK = 4


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((5, 3), 5),
        # Convolution kernels, as the paper folds them: all of the window and the input channels against the output's.
        ((3, 3, 3, 64), 27),
        ((7, 7, 3, 64), 147),
        ((1, 1, 64, 256), 64),
        ((3, 3, 256, 256), 2304),
        ((3, 256, 512), 768),
        ((3, 3, 3, 32, 64), 864),
        # Attention: a dense layer from embed to heads and back.
        ((256, 8, 32), 256),
        ((4096, 2, 128), 4096),
        ((768, 3, 12, 64), 768),
        ((8, 32, 256), 256),
        ((64, 2, 32), 64),
    ],
)
def test_the_even_split(shape, rows) -> None:
    assert math.prod(shape[: even_split(shape)]) == rows


def view(matrix):
    """Low rank without a memory: what an update lacks is what the view does not keep."""
    policy = by_matrix(
        lambda rows, columns: gc.compressors.low_rank(RANK, (rows, columns)),
        dense=gc.compressors.dense(),
        matrix=matrix,
    )
    return gc.exchange(policy, axis_name=AXIS, memory=gc.memory.none())


def energy_kept(matrix, tensor: np.ndarray) -> float:
    """Of the mean gradient's squares, after ten steps of a power iteration; workers differ around it."""
    state, update = mapped(view(matrix), {"w": tensor.shape})
    noise = np.random.default_rng(1).standard_normal((N, *tensor.shape)) * tensor.std()
    gradients = {"w": (tensor + noise - noise.mean(axis=0)).astype(np.float32)}
    for _ in range(10):
        updates, state = update(gradients, state)
    lost = np.asarray(updates["w"], np.float64)[0] - tensor
    return 1 - float((lost**2).sum() / (tensor**2).sum())


def floats_sent(matrix, shape) -> int:
    """Put into the collectives of the compiled program, less the word that says whether all is finite."""
    world = environment("shard_map-auto-vma", gc.powersgd(axis_name=AXIS, rank=RANK, matrix=matrix))
    params = {"w": np.zeros(shape, np.float32)}
    gradients = {"w": np.zeros((8, *shape), np.float32)}
    report = gc.wire_bytes(world.jitted.lower(gradients, world.init(params), params).compile())
    assert set(report.by("kind", "dtype")) == {("all-reduce", "f32")}
    return report.operand // 4 - 1


def low_rank_and_noise(*shape: int, noise: float) -> np.ndarray:
    """Matrices ``[..., rows, columns]``, each of rank 4 but for a part of its energy."""
    rng = np.random.default_rng(0)
    *stack, rows, columns = shape
    clean = rng.standard_normal((*stack, rows, RANK)) @ rng.standard_normal((*stack, RANK, columns)) / 2
    return clean + math.sqrt(noise) * rng.standard_normal(shape)


@pytest.mark.slow
def test_stacked_layers_are_matrices_of_their_own() -> None:
    """Six layers of 64 x 48 as one matrix [384, 48] share four columns; layer by layer each has its own."""
    tensor = low_rank_and_noise(6, 64, 48, noise=0.01)
    stacked = {"w": 1}
    assert energy_kept(None, tensor) < 0.8
    assert energy_kept(stacked, tensor) > 0.98
    assert energy_kept({"w": (1, 1)}, tensor) == energy_kept(stacked, tensor)
    assert floats_sent(None, tensor.shape) == RANK * (6 * 64 + 48)
    assert floats_sent(stacked, tensor.shape) == 6 * RANK * (64 + 48)


def tree():
    return {
        "bias": (6,),
        "layers": {"attention": (3, 12, 2, 5), "bias": (3, 40), "kernel": (3, 16, 14), "scale": (3,)},
        "out": (2, 8, 20),
        "same": (16, 14),
    }


def by_name(leaves: dict) -> dict:
    """NumPy's view of the tree: a tensor for each matrix, and the rest as it is; ``[N, ...]`` in, ``[N, ...]`` out."""
    layers = leaves["layers"]
    split = {f"attention/{i}": np.asarray(layers["attention"])[:, i].reshape(N, 12, 10) for i in range(3)}
    split |= {f"kernel/{i}": np.asarray(layers["kernel"])[:, i] for i in range(3)}
    split |= {"out": np.asarray(leaves["out"]).reshape(N, 16, 20), "same": np.asarray(leaves["same"])}
    rest = {"bias": leaves["bias"], "layers/bias": layers["bias"], "scale": layers["scale"]}
    return split | {k: np.asarray(v) for k, v in rest.items()}


MATRICES = ("attention/0", "attention/1", "attention/2", "kernel/0", "kernel/1", "kernel/2", "out", "same")


def is_shape(x) -> bool:
    return isinstance(x, tuple)


def test_replay_of_stacked_matrices() -> None:
    """Twelve steps against NumPy with a matrix for each layer: updates, residuals and every matrix's Q; and each step once
    more from the state before it, because a power iteration magnifies rounding."""
    tx = gc.powersgd(axis_name=AXIS, rank=2, matrix={"^layers/": 1}, seed=3)
    shapes = tree()
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=is_shape)
    state, update = vmapped(tx, params, N)

    def held(state) -> tuple[list, list]:
        """Residuals ``[N, block]`` and Q ``[columns, rank]`` of each matrix, in the order of :data:`MATRICES`.

        Tensors of one shape are a part: the single 16 x 14 comes with the stacked ones.
        """
        inner = exchange_state(state)
        attention, (kernel, same), (out,) = [(list(zip(m, c, strict=True))) for m, c in parts(inner)]
        marks = [*attention, kernel, out, same]
        residuals = [np.asarray(m.value)[:, i] for m, _ in marks for i in range(m.rows)]
        right = [np.asarray(q)[i] for _, q in marks for i in range(q.shape[0])]
        return residuals, right

    def parts(inner):
        found = [(m, c) for m, c in zip(inner.memory, inner.compressor, strict=True) if jax.tree.leaves(c)]
        return [found[0], found[1], found[2]]

    flat = {
        k: v.shape[1:] for k, v in by_name(jax.tree.map(lambda s: np.zeros((N, *s)), shapes, is_leaf=is_shape)).items()
    }
    first = dict(zip(MATRICES, held(state)[1], strict=True))
    assert not np.array_equal(first["kernel/0"], first["kernel/1"])
    oracle = PowerSgd(flat, N, first)
    rng = np.random.default_rng(0)
    steady = jax.tree.map(lambda s: rng.standard_normal((N, *s)), shapes, is_leaf=is_shape)
    for step in range(12):
        oracle.resume(held(state)[0], held(state)[1])
        gradients = jax.tree.map(lambda g: (g + rng.standard_normal(g.shape) / 4).astype(np.float32), steady)
        updates, state = update(gradients, state)
        want = oracle.step(by_name(gradients))
        got = by_name(updates)
        for name in flat:
            assert (got[name] == got[name][:1]).all()
            close(got[name][0], want[name], 2e-5, f"step {step}, {name}")
        for name, e, q in zip(MATRICES, *held(state), strict=True):
            close(e.reshape(oracle.kept[name].shape), oracle.kept[name], 2e-5, f"residual of {name}")
            close(q, oracle.q[name] / np.abs(oracle.q[name]).max(axis=0), 2e-5, f"Q of {name}")


def test_a_function_says_it_too() -> None:
    """By path and leaf; ``None`` is the default split."""

    def matrix(path: str, leaf: jax.ShapeDtypeStruct):
        return 1 if path.startswith("layers/") and len(leaf.shape) == 3 else None

    params = {"layers": {"w": np.zeros((3, 20, 16), np.float32)}, "out": np.zeros((4, 8, 32), np.float32)}
    one, other = (
        jax.eval_shape(gc.powersgd(axis_name=None, rank=1, matrix=m).init, params) for m in (matrix, {"^layers": 1})
    )
    assert [a.shape for a in jax.tree.leaves(one)] == [a.shape for a in jax.tree.leaves(other)]
    assert [q.shape for q in jax.tree.leaves(one.compressor)] == [(3, 16, 1), (1, 32, 1)]


def test_the_first_pattern_that_is_found_counts() -> None:
    params = {"layers": {"k": np.zeros((3, 20, 16), np.float32), "q": np.zeros((3, 20, 16), np.float32)}}
    tx = gc.powersgd(axis_name=None, rank=1, matrix={"/q": (0, 1), "layers/": 1})
    state = jax.eval_shape(tx.init, params)
    assert [q.shape for q in jax.tree.leaves(state.compressor)] == [(3, 16, 1), (1, 320, 1)]


@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        ("layers/", TypeError, "matrix must map patterns of paths to splits"),
        ({"(": 1}, ValueError, "matrix must map regular expressions, got"),
        ({"a": 1.0}, TypeError, "matrix must give 'a' the number of leading dimensions"),
        ({"a": (1,)}, TypeError, r"or a pair \(batch, rows\)"),
        ({"a": -1}, ValueError, "the batch dimensions that matrix gives 'a' must be an integer of at least 0"),
        ({"a": (1, 0)}, ValueError, "the row dimensions that matrix gives 'a' must be an integer of at least 1"),
    ],
)
def test_mistakes_are_refused_at_construction(matrix, error, message) -> None:
    with pytest.raises(error, match=message):
        gc.powersgd(axis_name=AXIS, matrix=matrix)


def test_a_split_without_columns_names_the_tensor_and_the_remedy() -> None:
    tx = gc.powersgd(axis_name=None, matrix={"layers/": (1, 1)})
    with pytest.raises(ValueError, match=r"no columns of 'layers/bias' of shape \(3, 40\); give it 1 alone"):
        tx.init({"layers": {"bias": np.zeros((3, 40), np.float32)}})


def test_momentum_is_that_of_the_paper() -> None:
    """m <- lambda m + delta; x <- x - rate (delta + m): the paper's algorithm 2, lines 11 and 12."""
    rng = np.random.default_rng(0)
    plain, tx = (gc.powersgd(axis_name=AXIS, rank=2, **options) for options in ({}, {"momentum": 0.8}))
    shapes = {"bias": (7,), "w": (20, 12)}
    state, update = mapped(optax.chain(tx, optax.sgd(0.1)), shapes)
    bare, averages = mapped(plain, shapes)
    m = {k: np.zeros(s) for k, s in shapes.items()}
    for step in range(10):
        gradients = {k: rng.standard_normal((N, *s)).astype(np.float32) for k, s in shapes.items()}
        updates, state = update(gradients, state)
        delta, bare = averages(gradients, bare)
        for k in shapes:
            mean = np.asarray(delta[k], np.float64)[0]
            m[k] = 0.8 * m[k] + mean
            close(updates[k][0], -0.1 * (mean + m[k]), 1e-5, f"step {step}, {k}")
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1"):
        gc.powersgd(axis_name=AXIS, momentum=1)
