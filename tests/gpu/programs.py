"""What the tests of programs for GPU share: when they run, and the sets that they run on."""

import pytest

from benchmarks import gpu_programs as gpu
from tests.compiled_programs import cases

needs_compiler = [pytest.mark.gpu, pytest.mark.skipif(not gpu.available(), reason=gpu.MISSING)]

(ONE_NODE,) = [name for name, topology in gpu.TOPOLOGIES.items() if topology.parts == 1]
(SEVERAL,) = [name for name, topology in gpu.TOPOLOGIES.items() if topology.parts > 1]


def methods(topology: str) -> list:
    """Every registered method on a topology; all but a few are slow."""
    return cases(topology, some_quick=True)
