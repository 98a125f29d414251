"""What the tests of programs for TPU share: when they run, and the sets that they run on."""

import pytest

from benchmarks import tpu_programs as tpu

needs_compiler = [
    pytest.mark.tpu,
    pytest.mark.skipif(not tpu.available(), reason="libtpu is not installed: pip install '.[tpu]'"),
]

ONE_SLICE = [name for name, topology in tpu.TOPOLOGIES.items() if topology.slices == 1]
(SLICED,) = [name for name, topology in tpu.TOPOLOGIES.items() if topology.slices > 1]
QUICK = ("dense", "dgc", "terngrad", "block_quantized")
"""Methods whose programs for the smallest topology, and between slices, are compiled in the quick suite."""


def methods(topology: str) -> list:
    """Every registered method on a topology; all but a few are slow."""
    quick = QUICK if topology in (ONE_SLICE[0], SLICED) else ()

    def case(name: str):
        # A program is compiled once for all tests of it.
        marks = [pytest.mark.xdist_group(f"{name} {topology}")] + ([] if name in quick else [pytest.mark.slow])
        return pytest.param(name, topology, marks=marks, id=f"{name}-{topology}")

    return [case(name) for name in tpu.METHODS]
