"""A large model's exchange on TPU: temporaries and passes over memory."""

import pytest

import gradcomp_jax as gc
from benchmarks import tpu_programs as tpu
from gradcomp_jax.planning import MODELS

from .programs import ONE_SLICE, needs_compiler

pytestmark = [*needs_compiler, pytest.mark.slow]


def test_dgc_of_resnet50_needs_less_than_a_gradient_of_temporaries() -> None:
    """Velocity and accumulator are updated in place; what is not a multiple of a block is copied to be padded."""
    params = MODELS["resnet50"]()
    gradient = 4 * sum(leaf.size for leaf in params.values())
    tx = gc.dgc(axis_name="data")
    memory = gc.lower_update(params, tx, tpu.TOPOLOGIES[ONE_SLICE[0]].mesh()).compile().memory_analysis()
    assert memory.temp_size_in_bytes < gradient
    assert memory.alias_size_in_bytes >= 2 * gradient
