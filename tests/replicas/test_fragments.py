"""Fragments by layer: what is in them, when each has its turn, and that nothing but the step decides it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.replicas.fragments import members_of
from tests.replicas.problem import AXIS, N, mesh_of

LAYERS = ("embed", r"layers_\d+", "norm_f|head")
FORWARD = ["embed", *(f"layers_{i}" for i in range(12)), "head"]
"""What a path begins with, in the order of the forward pass; that of the tree is another."""
EVERY, RATE = 6, 0.1


def params() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    layers = {name: {"bias": np.zeros(2, np.float32), "kernel": rng.normal(size=(3, 2))} for name in FORWARD}
    tree = {**layers, "norm_f": {"scale": rng.normal(size=2)}}
    return jax.tree.map(lambda x: x.astype(np.float32), tree)


def place(name: str) -> int:
    return FORWARD.index("head" if name == "norm_f" else name)


@pytest.mark.parametrize("number", range(1, 15))
def test_layers_are_dealt_out_in_the_order_of_the_forward_pass(number: int) -> None:
    """Strided: a layer goes to its place modulo the fragments; sequential: neighbours, as many in each up to one."""
    assert list(params()) != FORWARD != sorted(params())
    strided = gc.fragments(number, layers=LAYERS)(params())
    assert strided == {name: dict.fromkeys(leaves, place(name) % number) for name, leaves in params().items()}
    sequential = gc.fragments(number, layers=LAYERS, order="sequential")(params())
    of_layer = [sequential[name]["kernel"] for name in FORWARD]
    assert of_layer == sorted(of_layer)
    sizes = np.bincount(of_layer, minlength=number)
    assert len(sizes) == number and sizes.min() >= sizes.max() - 1
    assert all(len({*sequential[name].values(), of_layer[place(name)]}) == 1 for name in sequential)


def test_a_part_has_the_leaves_of_its_number_and_the_last_comes_first() -> None:
    tree = {"a": np.zeros(1), "b": {"c": np.zeros(2), "d": np.zeros(3)}, "e": np.zeros(4)}
    assert members_of(lambda p: {"a": 1, "b": {"c": 0, "d": 2}, "e": 0}, tree) == [[2], [0], [1, 3]]
    # A prefix says it of all that is below.
    assert members_of(lambda p: {"a": np.int64(1), "b": 0, "e": 1}, tree) == [[0, 3], [1, 2]]


def test_numbers_anywhere_in_a_match_are_the_layer() -> None:
    tree = {"encoder": {"blocks": [np.zeros(1)] * 11}, "decoder": {"blocks": [np.zeros(1)] * 2}}
    got = gc.fragments(13, layers=(r"encoder/blocks/\d+", r"decoder/blocks/\d+"))(tree)
    assert got == {"encoder": {"blocks": list(range(11))}, "decoder": {"blocks": [11, 12]}}
    # Layers that are stacked are one leaf, and one layer.
    stacked = {"embed": np.zeros(2), "layers": {"kernel": np.zeros((12, 2)), "bias": np.zeros((12, 1))}}
    got = gc.fragments(2, layers=("embed", "layers"))(stacked)
    assert got == {"embed": 0, "layers": {"kernel": 1, "bias": 1}}


def test_mistakes_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"no pattern of layers=.* is found in 'norm_f/scale'; add one where"):
        gc.fragments(2, layers=("embed", r"layers_\d+", "head"))(params())
    with pytest.raises(
        ValueError, match="'emmbed' of layers is found in none of 29 paths, which read like 'embed/bias'"
    ):
        gc.fragments(2, layers=("emmbed", "."))(params())
    with pytest.raises(ValueError, match="14 layers cannot be divided into 15 fragments: give at most 14"):
        gc.fragments(15, layers=LAYERS)(params())
    with pytest.raises(ValueError, match=r"layers must be patterns .* got 'embed'"):
        gc.fragments(2, layers="embed")
    with pytest.raises(ValueError, match="layers must be regular expressions"):
        gc.fragments(2, layers=("(",))
    with pytest.raises(ValueError, match="did you mean 'strided'"):
        gc.fragments(2, layers=LAYERS, order="stride")
    with pytest.raises(ValueError, match="number must be an integer of at least 1, got 0"):
        gc.fragments(0, layers=LAYERS)
    tree = {"a": np.zeros(1), "b": np.zeros(2)}
    for numbers, message in (
        ({"a": 0, "b": 2}, "fragment 1 of 3 has no tensor: number the fragments 0, 1, 2"),
        ({"a": 0, "b": -1}, "an integer from 0 on; got -1"),
        ({"a": 0, "b": True}, "an integer from 0 on; got True"),
        ({"a": 0}, "parts must return for each leaf of the parameters"),
        (None, "parts must return for each leaf of the parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            members_of(lambda p, numbers=numbers: numbers, tree)
    tx = gc.diloco(gc.dense(axis_name=None), axis_name=None, every=2, parts=gc.fragments(3, layers=LAYERS))
    with pytest.raises(ValueError, match="parts must be at most every=2"):
        jax.eval_shape(tx.init, params())


def loss(p, target):
    return jnp.mean(
        sum(0.5 * jnp.sum((x - y[0]) ** 2) for x, y in zip(*map(jax.tree.leaves, (p, target)), strict=True))
    )


def targets(step: int, workers: int = N):
    rng = np.random.default_rng(100 + step)
    return jax.tree.map(lambda x: rng.normal(size=(workers, *x.shape)).astype(np.float32), params())


def streaming(inner=None, *, order="strided", method=None, **options):
    method = gc.dense(axis_name=AXIS) if method is None else method
    parts = gc.fragments(3, layers=LAYERS, order=order)
    options = {"every": EVERY, "learning_rate": 0.6, "momentum": 0.8, **options}
    outer = gc.diloco(method, axis_name=AXIS, parts=parts, **options)
    return optax.chain(*([inner] if inner else []), optax.sgd(RATE), outer)


def train(tx, steps, *, state=None, begin=0, batches=targets, workers=N):
    mesh = mesh_of(workers)
    state = gc.init_state(params(), tx, mesh, replicas=True) if state is None else state
    step = gc.make_train_step(loss, tx, mesh, donate=False)
    for n in range(begin, begin + steps):
        state, _ = step(state, batches(n, workers))
        yield state


@pytest.mark.slow
@pytest.mark.parametrize("order", ("strided", "sequential"))
def test_replay(order: str) -> None:
    """Fragment p has its outer step when p + 1 of 3 parts of the period are over; others take their own steps."""
    of = gc.fragments(3, layers=LAYERS, order=order)(params())
    x = [jax.tree.map(np.float64, params()) for _ in range(N)]
    centre, velocity = x[0], jax.tree.map(np.zeros_like, x[0])
    for n, state in enumerate(train(streaming(order=order), 14)):
        ours, batch = [], targets(n)
        for j in range(N):
            ours.append(jax.tree.map(lambda a, y, j=j: a - RATE * (a - y[j]), x[j], batch))
        mean = jax.tree.map(lambda *a: sum(a) / N, *ours)
        turn = jax.tree.map(lambda p, n=n: (n + 1) % EVERY == (p + 1) * EVERY // 3 % EVERY, of)
        come = jax.tree.map(np.subtract, centre, mean)
        velocity = jax.tree.map(lambda t, v, d: 0.8 * v + d if t else v, turn, velocity, come)
        centre = jax.tree.map(lambda t, c, d, v: c - 0.6 * (d + 0.8 * v) if t else c, turn, centre, come, velocity)
        x = [jax.tree.map(lambda t, c, a: c if t else a, turn, centre, one) for one in ours]
        for j in range(N):
            jax.tree.map(
                lambda got, want, j=j: np.testing.assert_allclose(got.value[j], want, rtol=2e-5, atol=2e-5),
                state.params,
                x[j],
                is_leaf=lambda leaf: isinstance(leaf, gc.PerDevice),
            )
