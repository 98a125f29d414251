"""The TPU topologies that programs are compiled for, as the real TPU compiler describes them; nobody has to own one."""

import functools
import importlib.util
import os
from typing import Any

from benchmarks.compiled.programs import Topology


def available() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


MISSING = "libtpu is not installed: pip install '.[tpu]'"
PACKAGES = ("libtpu",)
NAME, COMMAND, DEVICE, PARTS = "tpu", "tpu.py", "chip", "slices"
FORMS = (True, False)
"""Of the tables of several slices: hierarchical, and with all chips as workers."""


@functools.cache
def compiler_devices(name: str, slices: int = 1) -> list[Any]:
    """The chips of a topology as the compiler knows them, slice by slice."""
    from jax.experimental import topologies

    # Without it libtpu asks a metadata server for the machine's place in a pod and waits for an answer.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    # Without it a second process is refused the library: there might be a chip that only one can hold.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    several = {} if slices == 1 else {"num_slices": slices}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices
    return list(devices) if slices == 1 else sorted(devices, key=lambda d: (d.slice_index, d.id))


def _topology(name: str, compilers_name: str, memory: int, slices: int = 1) -> Topology:
    return Topology(name, functools.partial(compiler_devices, compilers_name, slices), memory, slices)


# Memory: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.
TOPOLOGIES = {
    topology.name: topology
    for topology in (
        _topology("v5e 4x4", "v5e:4x4", 16),
        _topology("v5e 16x16", "v5e:16x16", 16),
        _topology("v5p 4x4x4", "v5p:4x4x4", 95),
        _topology("4 slices of v6e 4x4", "v6e:4x4", 32, slices=4),
    )
}

LARGE = _topology("v5p 2x2x1", "v5p:2x2x1", 95)
"""For large gradient trees: with few chips the compiler takes seconds in place of minutes."""
