"""A step and an update that are called with the right things in the wrong places say what belongs there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.training.problem import mesh_of

N = 2
X = np.ones((N, 8), np.float32)
PARAMS = {"w": np.ones((8, 8), np.float32), "b": np.zeros(8, np.float32)}


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


def chain() -> optax.GradientTransformation:
    return optax.chain(gc.topk_sgd(axis_name="data", density=0.25, block=16), optax.sgd(0.1))


def state_of(tx: optax.GradientTransformation) -> Any:
    return jax.eval_shape(lambda: gc.init_state(PARAMS, tx, mesh_of(N)))


def zeros_of(tx: optax.GradientTransformation) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state_of(tx))


def step() -> Any:
    return gc.make_train_step(loss, chain(), mesh_of(N), donate=False)


CALLS = {
    "parameters": (lambda: (PARAMS, X), r"state is a dict without params.*gradcomp_jax\.init_state"),
    "the optimizer's state": (lambda: (zeros_of(chain()).opt_state, X), r"state is a tuple without.*init_state"),
    "the batch first": (lambda: (X, zeros_of(chain())), r"called as step\(state, batch\)"),
    "all that a step returned": (lambda: ((zeros_of(chain()), {}), X), r"write state, metrics = step\(state, batch\)"),
    "no batch": (lambda: (zeros_of(chain()),), r"one batch, a tree of arrays: step\(state, batch\)"),
    "two arrays": (lambda: (zeros_of(chain()), X, X), r"step\(state, \(x, y\)\) for several"),
    "a string in the batch": (
        lambda: (zeros_of(chain()), {"x": X, "name": "train"}),
        r"batch\['name'\] is of type str.*take it",
    ),
    "an object": (lambda: (zeros_of(chain()), object()), r"batch is of type object and no array.*next\(\.\.\.\)"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_step_says_what_it_is_called_with(case: str) -> None:
    given, sentence = CALLS[case]
    with pytest.raises(TypeError, match=sentence):
        step()(*given())


def test_a_loss_that_lacks_an_argument_says_so_itself() -> None:
    wrong = gc.make_train_step(lambda p: p["w"].sum(), chain(), mesh_of(N), donate=False)
    with pytest.raises(TypeError, match=r"<lambda>\(\) takes 1 positional argument"):
        wrong(zeros_of(chain()), X)


def test_a_compressor_in_the_place_of_an_exchange() -> None:
    tx = optax.chain(gc.compressors.topk(0.25), optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"TopK is a compressor.*gradcomp_jax\.exchange\(compressor, axis_name"):
        gc.make_train_step(loss, tx, mesh_of(N)).lower(state_of(tx), X)


@pytest.mark.parametrize("wrong", ["pair", "order"])
def test_an_update_of_what_is_no_gradient(wrong: str) -> None:
    mesh = mesh_of(N)
    tx = gc.unreduced(chain(), mesh)

    def update(x: Any) -> Any:
        state = tx.init(PARAMS)
        found = gc.local_value_and_grad(loss, axis_name="data", mesh=mesh)(PARAMS, x)
        return tx.update(found, state, PARAMS) if wrong == "pair" else tx.update(state, found[1], PARAMS)

    with pytest.raises(ValueError, match=r"parameters of 2: call tx\.update\(gradient, state, params\)"):
        jax.eval_shape(update, X)


def test_a_seed_that_is_a_string() -> None:
    with pytest.raises(TypeError, match=r"rngs must be a seed or a key, such as jax\.random\.key\(0\), got 'seed'"):
        gc.make_train_step(loss, chain(), mesh_of(N), rngs="seed")


def test_the_bytes_of_what_is_only_lowered() -> None:
    with pytest.raises(ValueError, match=r"got Lowered: pass jax\.jit\(f\)\.lower\(\.\.\.\)\.compile\(\)"):
        gc.wire_bytes(step().lower(state_of(chain()), X))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["mask", "chain"])
def test_a_checkpoint_of_another_chain_names_what_goes_on(wrapper: str, tmp_path: Any) -> None:
    mesh = mesh_of(N)
    other = {
        "mask": lambda: optax.masked(chain(), {"w": True, "b": True}),
        "chain": lambda: optax.chain(optax.clip(1.0), chain()),
    }
    gc.save_checkpoint(tmp_path / "saved", gc.init_state(PARAMS, chain(), mesh))
    with pytest.raises(ValueError, match=r"build the state with the chain that wrote.*gradcomp_jax\.replace_method"):
        gc.restore_checkpoint(tmp_path / "saved", gc.init_state(PARAMS, other[wrapper](), mesh))


def test_replicas_that_meet_by_an_optimizer() -> None:
    tx = gc.local_sgd(optax.sgd(0.1), axis_name="data", every=2)
    state = jax.eval_shape(lambda: gc.init_state(PARAMS, tx, mesh_of(N), replicas=True))
    with pytest.raises(ValueError, match=r"has none: give it a method such as gradcomp_jax\.dense"):
        gc.make_train_step(loss, tx, mesh_of(N)).lower(state, X)
