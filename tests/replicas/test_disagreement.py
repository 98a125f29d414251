"""Replicas whose gradients differ for good: what they share arrives, and neither memories nor replicas run away."""

import functools
from collections.abc import Callable
from typing import Any

import optax
import pytest

import gradcomp_jax as gc
from tests.conformance.disagreement import MOST_GROWTH, STEPS, Course, courses, failing
from tests.conformance.environments import AXIS

sgd = optax.sgd(1.0)

WRAPPERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "delayed": lambda m: optax.chain(gc.delayed_average(m, axis_name=AXIS, delay=3), sgd),
    "delayed-sparse": lambda m: optax.chain(gc.delayed_average(m, axis_name=AXIS, delay=2, every=2), sgd),
    "elastic": lambda m: optax.chain(sgd, gc.elastic_average(m, axis_name=AXIS)),
    "local": lambda m: optax.chain(sgd, gc.local_sgd(m, axis_name=AXIS, every=2)),
    "diloco": lambda m: optax.chain(sgd, gc.diloco(m, axis_name=AXIS, every=2)),
    "accumulate": lambda m: gc.accumulate(optax.chain(m, sgd), axis_name=AXIS, every=2),
}

METHODS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "topk": functools.partial(gc.topk_sgd, axis_name=AXIS, density=1 / 16, block=128),
    "int8": functools.partial(gc.block_quantized, axis_name=AXIS, block=128),
}

QUANTIZED = gc.compressors.block_quantized(block=128)
ALONE: dict[str, optax.GradientTransformation] = {
    "gossip": optax.chain(sgd, gc.gossip(axis_name=AXIS)),
    "gossip-int8": optax.chain(sgd, gc.gossip(axis_name=AXIS, compressor=QUANTIZED)),
    "gossip-exponential": optax.chain(
        sgd, gc.gossip(axis_name=AXIS, graph="exponential", every=2, compressor=QUANTIZED)
    ),
    "sparse_loco": optax.chain(sgd, gc.sparse_loco(axis_name=AXIS, every=2, density=1 / 16, chunk=128)),
}


@functools.cache
def run(wrapper: str, method: str, collective: str | None = None) -> dict[str, Course]:
    return courses(WRAPPERS[wrapper](METHODS[method](**({} if collective is None else {"collective": collective}))))


OVERSHOOTS = (
    "a difference to the centre is not a step towards it: an error feedback that has to wait adds up the same difference in"
    " every step, and the centre overshoots"
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cancelling", "noisy"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "wrapper", [w if w == "delayed" else pytest.param(w, marks=pytest.mark.slow) for w in WRAPPERS]
)
def test_as_with_a_gather(wrapper: str, method: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Nine tenths of what arrives with a gather, and at most three times what is held; nothing grows with the steps."""
    if (wrapper, method) == ("elastic", "topk"):
        request.applymarker(failing(OVERSHOOTS))
    here, there = run(wrapper, method)[kind], run(wrapper, method, "all_gather")[kind]
    check_bounded(here)
    assert here.kept[-1] <= 3 * there.kept[-1]
    assert here.delivered[-1] >= 0.9 * there.delivered[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "wrapper", [w if w == "delayed" else pytest.param(w, marks=pytest.mark.slow) for w in WRAPPERS]
)
def test_gathered(wrapper: str, method: str, request: pytest.FixtureRequest) -> None:
    """Nothing runs away where nothing is encoded twice, and two fifths of all arrives: the least, one step in two."""
    if (wrapper, method) == ("elastic", "topk"):
        request.applymarker(failing(OVERSHOOTS))
    for kind in ("cancelling", "noisy"):
        here = run(wrapper, method, "all_gather")[kind]
        check_bounded(here)
        assert here.delivered[-1] >= 0.4 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str) -> None:
    """Gossip keeps the sum of the replicas; a residual that decays loses some on purpose."""
    for kind, here in courses(ALONE[name]).items():
        if kind == "extreme" and name == "sparse_loco":
            # So much of some entries that the others wait for longer than the residual remembers.
            continue
        check_bounded(here)
        if name.startswith("gossip"):
            assert abs(here.delivered[-1] - STEPS) < 1e-3 * STEPS
        else:
            assert here.delivered[-1] > 0.3 * STEPS


def check_bounded(here: Course) -> None:
    assert here.growth() <= MOST_GROWTH
    # Equal replicas are apart by nothing or by what the compiler rounds.
    assert here.apart[-1] < 1e-3 or here.growth("apart") <= MOST_GROWTH
