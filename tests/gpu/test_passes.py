"""What an exchange costs a GPU by the real XLA:GPU compiler's count: memory passes, kernels and temporaries of every method."""

import pytest

from benchmarks import gpu_programs as gpu
from benchmarks.compiled import model, passes
from gradcomp_jax.methods.registry import METHODS

from .programs import needs_compiler

pytestmark = needs_compiler

QUICK = "dgc"

# Passes, kernels and temporaries in gradients: the goal, and where it is not reached what must not become more. A method that
# comes below its line gets a tighter one, or none.
GOAL = (10, 2 * len(model.few_leaves()) + 30, 0.5)
CEILINGS = {
    "dgc": (13, 55, 0.7),
    "topk_sgd": (13, 110, 0.5),
    "ef21": (14, 113, 0.5),
    "random_k": (10, 45, 0.5),
    "gradient_dropping": (13, 65, 0.5),
    "sparcml": (18, 91, 1.3),
    "demo": (29, 80, 1.2),
    "one_bit_sgd": (19, 98, 0.5),
    "block_quantized": (14, 42, 0.6),
    "fp8": (15, 40, 0.5),
    "one_bit_adam": (28, 102, 3.1),
    "ef_sign_sgd": (11, 38, 0.5),
    "powersgd": (13, 132, 0.1),
    "dion": (15, 170, 0.1),
    "eden": (39, 120, 1.2),
}


@pytest.mark.parametrize("method", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.slow) for n in METHODS])
def test_passes_kernels_and_temporaries(method: str) -> None:
    row = passes.measure(method, model.few_leaves(), gpu.LARGE)
    most = CEILINGS.get(method, GOAL)
    assert (row.passes <= most[0], row.kernels <= most[1], row.temporaries <= most[2]) == (True,) * 3, (row, most)
