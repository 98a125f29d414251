"""The ratios that the README states, on a gradient tree the shape of ResNet-50 with eight workers."""

import math

import pytest

import gradcomp_jax as gc
from gradcomp_jax.planning import resnet50

FLOAT32 = 2 * 7 * 4 * 25_557_032 // 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "ratio"),
    [
        pytest.param(lambda: gc.dense(axis_name="data"), 0.999, id="dense"),
        pytest.param(lambda: gc.dense(axis_name="data", dtype="bfloat16"), 1.999, id="bfloat16"),
        pytest.param(lambda: gc.terngrad(axis_name="data"), 9.5, id="terngrad"),
        pytest.param(lambda: gc.terngrad(axis_name="data", downlink="ternary"), 18, id="ternary"),
        pytest.param(lambda: gc.dgc(axis_name="data", density=1e-3), 400, id="dgc"),
    ],
)
def test_bytes_of_the_compiled_program(mesh8, make, ratio) -> None:
    shapes = resnet50()
    assert len(shapes) == 161
    assert sum(math.prod(leaf.shape) for leaf in shapes.values()) == 25_557_032
    compiled = gc.lower_update(shapes, make(), mesh8, axis_name="data").compile()
    report = gc.wire_bytes(compiled)
    assert FLOAT32 / report.sent >= ratio, str(report)
    memory = compiled.memory_analysis()
    # Dense leaves are joined into one buffer and taken apart again: up to two gradients.
    assert memory.temp_size_in_bytes <= (1.5 if ratio > 2 else 2.01) * 4 * 25_557_032
