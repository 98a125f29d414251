"""What the tests of programs for TPU share: when they run, and the sets that they run on."""

import pytest

from benchmarks import tpu_programs as tpu
from tests.compiled_programs import cases

needs_compiler = [pytest.mark.tpu, pytest.mark.skipif(not tpu.available(), reason=tpu.MISSING)]

ONE_SLICE = [name for name, topology in tpu.TOPOLOGIES.items() if topology.parts == 1]
(SLICED,) = [name for name, topology in tpu.TOPOLOGIES.items() if topology.parts > 1]


def methods(topology: str) -> list:
    """Every registered method on a topology; all but a few are slow, and all on the larger slices."""
    return cases(topology, some_quick=topology in (ONE_SLICE[0], SLICED))
