"""Parameters of FSDP, gathered in few bits by a program of the real XLA:GPU compiler."""

import pytest

from benchmarks import gpu_programs as gpu
from tests.compiled_programs import check_gathered_parameters

from .programs import ONE_NODE, needs_compiler

pytestmark = [*needs_compiler, pytest.mark.slow]


def test_parameters_in_four_bits() -> None:
    check_gathered_parameters(gpu.TOPOLOGIES[ONE_NODE].mesh())
