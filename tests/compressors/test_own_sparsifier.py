"""A sparsifier of one's own that lacks what owners need says so, and goes where nobody needs it."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.compressors.topk import TopK
from tests.training.problem import mesh_of

PARAMS = {"w": np.ones((8, 8), np.float32)}


@dataclasses.dataclass(frozen=True)
class Largest(TopK):
    """One's own selection, which inherits no rounding."""

    rounding = Compressor.rounding


def trace(collective: Any) -> Any:
    base = gc.compressors.topk(0.25, block=16, dtype="bfloat16")
    own = Largest(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
    tx = optax.chain(gc.exchange(own, axis_name="data", collective=collective), optax.sgd(0.1))
    state = jax.eval_shape(lambda: gc.init_state(PARAMS, tx, mesh_of(2)))
    return gc.make_train_step(lambda p, x: (x @ p["w"]).mean(), tx, mesh_of(2)).lower(
        state, np.ones((2, 8), np.float32)
    )


def test_a_sparsifier_without_rounding_names_what_to_define() -> None:
    sentence = r"Largest is a sparsifier .* without rounding\(rows, payload, info\).*define it.*collective='all_gather'"
    with pytest.raises(TypeError, match=sentence):
        trace(gc.collectives.TwoPhase(remainder="put_back"))


def test_the_remedy_is_one() -> None:
    trace("all_gather")


def test_other_codes_have_no_rounding() -> None:
    with pytest.raises(TypeError, match=r"is not a sparsifier: only what sends some of the entries"):
        gc.compressors.ternary().rounding(np.ones((1, 8), np.float32), ())
