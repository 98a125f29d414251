"""A momentum twice is warned of, whatever is around the chain, and no other chain is."""

from typing import Any

import jax
import optax
import pytest

import gradcomp_jax as gc
from tests.training.problem import mesh_of, params

N = 8


def exchange() -> optax.GradientTransformation:
    return gc.dgc(axis_name="data", density=0.25, block=16)


AFTER = {"adam": optax.adam(1e-3), "lion": optax.lion(1e-3), "sgd": optax.sgd(0.1, momentum=0.9)}


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("method", "after", "sentence"),
    [
        ("dgc", "adam", r"gradcomp_jax.dgc has a momentum inside and goes before Adam.*gradcomp_jax.block_quantized"),
        ("dgc", "sgd", r"gradcomp_jax.dgc .* before the momentum of optax.sgd.*plain optax.sgd\(learning_rate\)"),
        ("demo", "lion", r"gradcomp_jax.demo .* before Lion"),
    ],
)
def test_two_momenta_warn(method: str, after: str, sentence: str) -> None:
    tx = optax.chain(getattr(gc, method)(axis_name="data", block=16), optax.chain(AFTER[after]))
    with pytest.warns(UserWarning, match=sentence) as found:
        gc.init_state(params(), tx, mesh_of(N))
    # At the line of the user's that called, whatever of the library is in between.
    assert {warning.filename for warning in found} == {__file__}


WRAPPED = {
    "accumulate": lambda tx: gc.accumulate(tx, axis_name="data", every=2),
    "multi_transform": lambda tx: optax.multi_transform({"all": tx}, jax.tree.map(lambda _: "all", params())),
    "masked": lambda tx: optax.masked(tx, True),
    "switched": lambda tx: gc.switched({"dense": gc.dense(axis_name="data"), "dgc": tx}),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", WRAPPED)
def test_two_momenta_warn_within_wrappers(name: str) -> None:
    with pytest.warns(UserWarning, match=r"gradcomp_jax.dgc has a momentum inside and goes before AMSGrad"):
        gc.init_state(params(), WRAPPED[name](optax.chain(exchange(), optax.amsgrad(1e-3))), mesh_of(N))


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_a_momentum_after_accumulation_warns(recwarn: pytest.WarningsRecorder) -> None:
    inside, after = optax.chain(gc.block_quantized(axis_name="data"), optax.adam(1e-3)), optax.adam(1e-3)
    gc.init_state(params(), gc.accumulate(inside, axis_name="data", every=2), mesh_of(N))
    assert not recwarn.list
    alone = gc.accumulate(gc.block_quantized(axis_name="data"), axis_name="data", every=2)
    with pytest.warns(
        UserWarning, match=r"accumulate goes around the whole chain, and Adam after it steps on zeros.*take"
    ):
        gc.init_state(params(), optax.chain(alone, after), mesh_of(N))


def test_candidates_are_no_chain(recwarn: pytest.WarningsRecorder) -> None:
    candidates = {"dgc": exchange(), "dense": optax.chain(gc.dense(axis_name="data"), optax.trace(0.9))}
    gc.init_state(params(), optax.chain(gc.switched(candidates), optax.sgd(0.1)), mesh_of(N))
    assert not recwarn.list


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("method", "options"), [("topk_sgd", {}), ("dgc", {"momentum_correction": False}), ("dgc", {"momentum": 0.0})]
)
def test_one_momentum_does_not_warn(method: str, options: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    """Nor does a method without one, nor one with a momentum before plain SGD."""
    tx = optax.chain(getattr(gc, method)(axis_name="data", block=16, **options), AFTER["adam"])
    gc.init_state(params(), tx, mesh_of(N))
    gc.init_state(params(), optax.chain(gc.dgc(axis_name="data", block=16), optax.sgd(0.1)), mesh_of(N))
    assert not [w for w in recwarn if "momentum" in str(w.message)]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ("multi_transform", "switched"))
def test_a_first_moment_after_a_residual_that_is_one_warns(name: str) -> None:
    tx = optax.chain(gc.topk_sgd(axis_name="data", block=16), optax.adamw(1e-3))
    with pytest.warns(UserWarning, match=r"gradcomp_jax.topk_sgd keeps.*b1=0.9.*gradcomp_jax.adamw\(learning_rate"):
        gc.init_state(params(), WRAPPED[name](tx), mesh_of(N))


@pytest.mark.standard_promotion
def test_no_first_moment_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    selection, int8 = gc.topk_sgd(axis_name="data", block=16), gc.block_quantized(axis_name="data", block=16)
    chains = [optax.chain(selection, optax.adamw(1e-3, b1=0.0)), optax.chain(int8, optax.adamw(1e-3))]
    chains += [optax.chain(exchange(), optax.adam(1e-3, b1=0.0)), gc.adamw(1e-3, selection), gc.adamw(1e-3, int8)]
    for tx in chains:
        gc.init_state(params(), tx, mesh_of(N))
    assert not recwarn.list
