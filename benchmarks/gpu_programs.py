"""The GPU topologies that programs are compiled for by the real XLA:GPU compiler; nobody has to own a GPU."""

import functools
import importlib.util
import pathlib
from typing import Any

from benchmarks.compiled.programs import Topology

TARGET = pathlib.Path(__file__).parent / "compiled" / "h100.txtpb"


def available() -> bool:
    """Whether the GPU compiler is installed: the plugin for CUDA 12 or 13."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None for version in (12, 13))


MISSING = (
    "the GPU compiler is not installed: in an environment of its own, pip install '.[test]', then pip install --no-deps"
    " jax-cuda12-plugin==V jax-cuda12-pjrt==V with V the version of jax"
)
PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin")
NAME, COMMAND, DEVICE, PARTS = "gpu", "gpu.py", "GPU", "nodes"
FORMS = (True,)
"""Of the tables of several nodes: hierarchical."""


@functools.cache
def compiler_devices(topology: str) -> list[Any]:
    """The GPUs of a topology, node by node: partitions x nodes x GPUs of a node."""
    from jax.experimental import topologies

    # Without a description of the device the plugin looks for one in the machine.
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="H100", topology=topology, target_config=TARGET.read_text()
    )
    return sorted(described.devices, key=lambda d: (d.process_index, d.id))


def _topology(name: str, compilers_name: str, nodes: int = 1) -> Topology:
    return Topology(name, functools.partial(compiler_devices, compilers_name), 80, nodes)


TOPOLOGIES = {
    topology.name: topology for topology in (_topology("8 H100", "1x8x1"), _topology("2 nodes of 8 H100", "1x2x8", 2))
}

LARGE = TOPOLOGIES["8 H100"]
"""For large gradient trees."""
