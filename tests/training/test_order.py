"""Chains that would not train are refused, or warned of, where the state is made."""

import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.training.problem import mesh_of, params

OVER = {"axis_name": "data"}
N = 4


def wide() -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float32) for name, value in params().items()}


def state_of(tx: optax.GradientTransformation, replicas: bool = True):
    return gc.init_state(wide(), tx, mesh_of(N), replicas=replicas)


def local(method: optax.GradientTransformation) -> optax.GradientTransformation:
    return gc.local_sgd(method, **OVER, every=2)


@pytest.mark.parametrize(
    "inside",
    [
        optax.chain(optax.sgd(0.1), gc.gossip(**OVER)),
        optax.chain(optax.sgd(0.1), local(gc.dense(**OVER))),
        optax.chain(gc.dgc(**OVER), optax.sgd(0.1)),
    ],
    ids=["gossip", "local", "dgc"],
)
def test_a_choice_around_an_exchange(inside) -> None:
    """Without differences being tracked it was compiled, and the first NaN left the other workers waiting."""
    with pytest.raises(ValueError, match=r"optax.apply_if_finite.*leave the wrapper out"):
        state_of(optax.apply_if_finite(inside, 3))


def test_a_choice_before_an_average() -> None:
    state_of(optax.chain(optax.apply_if_finite(optax.sgd(0.1), 3), local(gc.dense(**OVER))))


@pytest.mark.parametrize("method", [gc.gossip(**OVER), local(gc.dense(**OVER))], ids=["gossip", "local"])
@pytest.mark.filterwarnings("error")
def test_replicas_that_meet_before_the_optimizer(method) -> None:
    with pytest.raises(UserWarning, match="put it last, after the optimizer"):
        state_of(optax.chain(method, optax.sgd(0.1)))
    state_of(optax.chain(optax.sgd(0.1), method))


@pytest.mark.parametrize(
    ("tx", "kind"),
    [
        (gc.elastic_average(gc.demo(**OVER), **OVER), "sign"),
        (gc.elastic_average(gc.sign_sgd(**OVER), **OVER), "sign"),
        (gc.delayed_average(gc.one_bit_adam(**OVER, warm_up_steps=3), **OVER, delay=2), "direction"),
    ],
    ids=["demo", "sign", "adam"],
)
def test_averages_of_what_is_no_mean(tx, kind: str) -> None:
    with pytest.raises(ValueError, match=f"is a {kind} and no mean.*gradcomp_jax.dgc"):
        state_of(optax.chain(optax.sgd(0.1), tx))


def test_averages_of_frequencies_are_means() -> None:
    state_of(optax.chain(optax.sgd(0.1), gc.elastic_average(gc.demo(**OVER, signed=False), **OVER)))


def test_accumulation_of_replicas() -> None:
    with pytest.raises(ValueError, match=r"make_train_step\(..., accumulate=...\)"):
        state_of(gc.accumulate(optax.chain(optax.sgd(0.01), local(gc.dense(**OVER))), **OVER, every=2))
