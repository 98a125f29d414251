"""Train steps and exchanges compiled for a topology, and what the compiler says of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import gradcomp_jax as gc
from benchmarks.compiled import model
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.training.lowering import state_shapes

DATA, OUTER, INNER = "data", "outer", "inner"
"""The axis of all devices; or the one between slices or nodes, and the one inside."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that a program is compiled for.

    Attributes:
        name: as people call it.
        describe: returns the devices as the compiler describes them, those of one slice or node as neighbours.
        memory: GB (1e9 bytes) of a device.
        parts: how many slices or nodes, joined by a data-centre network.
    """

    name: str
    describe: Callable[[], list[Any]]
    memory: int
    parts: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes, the slow one first."""
        return (DATA,) if self.parts == 1 else (OUTER, INNER)

    @property
    def axis_name(self) -> Any:
        """What a method over all devices is given."""
        return DATA if self.parts == 1 else self.axes

    @property
    def size(self) -> int:
        """How many devices."""
        return len(self.describe())

    @property
    def inner_size(self) -> int:
        """How many devices of one slice or node."""
        return self.size // self.parts

    def mesh(self) -> Mesh:
        """All devices along one axis, or those of each slice or node along the second of two."""
        devices = np.array(self.describe())
        return Mesh(devices if self.parts == 1 else devices.reshape(self.parts, -1), self.axes)


def transformation(method: str, topology: Topology, *, hierarchical: bool) -> optax.GradientTransformation:
    """A registered method and SGD after it: over all devices as workers, or on the slow axis for each device's shard."""
    if not hierarchical:
        tx = METHODS[method].build(axis_name=topology.axis_name)
    else:
        inner = METHODS[method].build(axis_name=OUTER)
        tx = gc.hierarchical(inner, axis_name=OUTER, inner_axis_name=INNER)
    return optax.chain(tx, optax.sgd(0.1))


@dataclasses.dataclass(frozen=True)
class Program:
    """A train step before the compiler saw it and after.

    Attributes:
        asked: bytes of what the library asks for, read from the program as lowered.
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
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: Any,
    replicas: bool = False,
) -> jax.stages.Traced:
    """Traces the step of ``gc.make_train_step`` from shapes; ``.lower().compile()`` compiles it."""
    step, place = gc.make_train_step(loss, tx, mesh, axis_name=axis_name), gc.data_sharding(mesh, axis_name=axis_name)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), batch)
    return step.trace(state_shapes(params, tx, mesh, axis_name, replicas=replicas), batch)


def outer_steps(tx: optax.GradientTransformation, topology: Topology) -> jax.stages.Compiled:
    """The train step of SGD on replicas and a method after it, for a large tree; the loss costs next to nothing."""
    params = model.few_leaves()

    def loss(params: Any, batch: Any) -> jax.Array:
        return sum(jnp.vdot(leaf, batch[name][0]) for name, leaf in params.items())

    batch = {name: jax.ShapeDtypeStruct((topology.size, *leaf.shape), leaf.dtype) for name, leaf in params.items()}
    chain = optax.chain(optax.sgd(0.1, momentum=0.9), tx)
    traced = trace_step(loss, params, batch, chain, topology.mesh(), axis_name=topology.axis_name, replicas=True)
    return traced.lower().compile()


def train_step(method: str, topology: Topology, *, hierarchical: bool = False) -> Program:
    """The compiled train step of a method on a topology; compiled once in a process."""
    return _train_step(method, topology, hierarchical)


@functools.cache
def _train_step(method: str, topology: Topology, hierarchical: bool) -> Program:
    mesh, tx = topology.mesh(), transformation(method, topology, hierarchical=hierarchical)
    batch = model.batch_shapes(mesh.size)
    traced = trace_step(model.loss, model.parameters(), batch, tx, mesh, axis_name=topology.axis_name)
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
        devices: those that share a worker's tensors, as :func:`gradcomp_jax.hierarchical` cuts them: by the rows of a matrix.
    """
    mesh = AbstractMesh((workers,), (OUTER,), axis_types=(AxisType.Auto,))
    tx = METHODS[method].build(axis_name=OUTER)
    shards = {
        name: jax.ShapeDtypeStruct((-(-leaf.shape[0] // devices), *leaf.shape[1:]), leaf.dtype)
        for name, leaf in model.parameters().items()
    }
    stacked = {name: jax.ShapeDtypeStruct((workers, *leaf.shape), leaf.dtype) for name, leaf in shards.items()}

    def update(stacked: Any, params: Any) -> Any:
        return tx.update(jax.tree.map(lambda g: g[0], stacked), tx.init(params), params)[0]

    spec = PartitionSpec(OUTER)
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec())
    lowered = jax.jit(mapped).trace(stacked, shards).lower(lowering_platforms=("cpu",))
    return gc.wire_bytes(lowered.as_text(dialect="hlo"), branch=-1)


def across(report: gc.WireReport, parts: int) -> int:
    """Bytes that one device sends to other slices or nodes; an all-reduce over both axes, such as the loss's, counts whole.

    Raises:
        ValueError: for another collective over both axes that is no all-to-all: who sends what to whom is not known.
    """
    total = 0
    for row in report.rows:
        if row.axis == (OUTER,) or (row.kind == "all-reduce" and row.axis == (OUTER, INNER)):
            total += row.sent_bytes
        elif row.axis is None or OUTER in row.axis:
            if row.kind != "all-to-all":
                raise ValueError(f"{row.name} is a {row.kind} over {row.axis}")
            total += row.operand_bytes * (parts - 1) // parts
    return total
