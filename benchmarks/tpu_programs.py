"""Train steps compiled by the real TPU compiler for topologies that nobody has to own; nothing runs."""

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.training.lowering import state_shapes

DATA, SLICES, CHIPS = "data", "slices", "chips"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips that a program is compiled for.

    Attributes:
        name: as the compiler knows it, for one slice.
        hbm: GB (1e9 bytes) of memory of a chip, https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.
        slices: how many slices, joined by a data-centre network.
    """

    name: str
    hbm: int
    slices: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes, the slow one first."""
        return (DATA,) if self.slices == 1 else (SLICES, CHIPS)

    def mesh(self) -> Mesh:
        """All chips along one axis, or those of each slice along the second of two."""
        devices = compiler_devices(self.name, self.slices)
        if self.slices == 1:
            return Mesh(np.array(devices), self.axes)
        ordered = sorted(devices, key=lambda d: (d.slice_index, d.id))
        return Mesh(np.array(ordered).reshape(self.slices, -1), self.axes)


TOPOLOGIES = {
    "v5e 4x4": Topology("v5e:4x4", 16),
    "v5e 16x16": Topology("v5e:16x16", 16),
    "v5p 4x4x4": Topology("v5p:4x4x4", 95),
    "4 slices of v6e 4x4": Topology("v6e:4x4", 32, slices=4),
}


def available() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def compiler_devices(name: str, slices: int = 1) -> list[Any]:
    """The chips of a topology as the compiler describes them, which nobody has to have."""
    from jax.experimental import topologies

    # Without it libtpu asks a metadata server for the machine's place in a pod and waits for an answer.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    # Without it a second process is refused the library: there might be a chip that only one can hold.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    several = {} if slices == 1 else {"num_slices": slices}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices)


WIDTH, HIDDEN, BLOCKS, CLASSES = 512, 1024, 1, 256
BATCH = 8  # of one chip


def parameters() -> dict[str, jax.ShapeDtypeStruct]:
    """A residual block and a classifier: 1.2 million float32 values, three matrices and two vectors."""
    shapes: dict[str, tuple[int, ...]] = {"head": (WIDTH, CLASSES)}
    for block in range(BLOCKS):
        shapes[f"scale{block}"], shapes[f"bias{block}"] = (WIDTH,), (HIDDEN,)
        shapes[f"up{block}"], shapes[f"down{block}"] = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def loss(params: Mapping[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Cross-entropy of the network's classes."""
    x, labels = batch
    for block in range(BLOCKS):
        normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params[f"scale{block}"]
        x = x + jax.nn.relu(normal @ params[f"up{block}"] + params[f"bias{block}"]) @ params[f"down{block}"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels).mean()


def batch_shapes(workers: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The global batch."""
    rows = workers * BATCH
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)


def transformation(method: str, topology: Topology, *, hierarchical: bool) -> optax.GradientTransformation:
    """A registered method and SGD after it: over all chips as one axis of workers, or between slices for each chip's shard."""
    if not hierarchical:
        tx = METHODS[method].build(axis_name=topology.axes if topology.slices > 1 else DATA)
    else:
        inner = METHODS[method].build(axis_name=SLICES)
        tx = gc.hierarchical(inner, axis_name=SLICES, inner_axis_name=CHIPS)
    return optax.chain(tx, optax.sgd(0.1))


@dataclasses.dataclass(frozen=True)
class Program:
    """A train step before the compiler saw it and after.

    Attributes:
        asked: bytes of what the library asks for, read from the program as lowered for TPU.
        made: bytes of what the compiler made of it.
        memory: the compiler's memory analysis.
    """

    asked: gc.WireReport
    made: gc.WireReport
    memory: Any

    @property
    def peak(self) -> int:
        """Bytes of arguments, results and temporaries together, what they share counted once."""
        m = self.memory
        return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


def trace_step(
    loss: Callable[..., Any], params: Any, batch: Any, tx: optax.GradientTransformation, mesh: Mesh, *, axis_name: Any
) -> jax.stages.Traced:
    """Traces the step of ``gc.make_train_step`` from shapes; ``.lower().compile()`` compiles it."""
    step, place = gc.make_train_step(loss, tx, mesh, axis_name=axis_name), gc.data_sharding(mesh, axis_name=axis_name)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), batch)
    return step.trace(state_shapes(params, tx, mesh, axis_name), batch)


def train_step(method: str, topology: str, *, hierarchical: bool = False) -> Program:
    """The compiled train step of a method on a topology; compiled once in a process."""
    return _train_step(method, topology, hierarchical)


@functools.cache
def _train_step(method: str, topology: str, hierarchical: bool) -> Program:
    where = TOPOLOGIES[topology]
    mesh, tx = where.mesh(), transformation(method, where, hierarchical=hierarchical)
    axis = where.axes if where.slices > 1 else DATA
    traced = trace_step(loss, parameters(), batch_shapes(mesh.size), tx, mesh, axis_name=axis)
    lowered = traced.lower()
    compiled = lowered.compile()
    # Of a method's stages the last is the one that it stays in.
    asked = gc.wire_bytes(lowered.as_text(dialect="hlo"), branch=-1, mesh=mesh)
    made = gc.wire_bytes(compiled, branch=-1, mesh=mesh)
    return Program(asked, made, compiled.memory_analysis())


@functools.cache
def predicted(method: str, workers: int, *, devices: int = 1) -> gc.WireReport:
    """What the method alone sends for the model, with no padding and no compiler: lowered for CPU on an abstract mesh.

    Args:
        method: a registered method.
        workers: N.
        devices: chips that share a worker's tensors, as :func:`gradcomp_jax.hierarchical` cuts them: by the rows of a matrix.
    """
    mesh = AbstractMesh((workers,), (SLICES,), axis_types=(AxisType.Auto,))
    tx = METHODS[method].build(axis_name=SLICES)
    shards = {
        name: jax.ShapeDtypeStruct((-(-leaf.shape[0] // devices), *leaf.shape[1:]), leaf.dtype)
        for name, leaf in parameters().items()
    }
    stacked = {name: jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype) for name, leaf in shards.items()}

    def update(stacked: Any, params: Any) -> Any:
        return tx.update(jax.tree.map(lambda g: g[0], stacked), tx.init(params), params)[0]

    spec = PartitionSpec(SLICES)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec())
    lowered = jax.jit(mapped).trace(stacked, shards).lower(lowering_platforms=("cpu",))
    return gc.wire_bytes(lowered.as_text(dialect="hlo"), branch=-1)


def across_slices(report: gc.WireReport, slices: int) -> int:
    """Bytes that one chip sends to other slices.

    Raises:
        ValueError: for a collective over both axes that is no all-to-all: who sends what to whom is not known.
    """
    total = 0
    for row in report.rows:
        if row.axis == (SLICES,):
            total += row.sent_bytes
        elif row.axis is None or SLICES in row.axis:
            if row.kind != "all-to-all":
                raise ValueError(f"{row.name} is a {row.kind} over {row.axis}")
            total += row.operand_bytes * (slices - 1) // slices
    return total


def gradient_bytes() -> int:
    """Bytes of one gradient in float32."""
    return 4 * sum(math.prod(leaf.shape) for leaf in parameters().values())
