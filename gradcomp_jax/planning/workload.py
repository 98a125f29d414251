"""The work of a step and its device: computation, gradient, and how fast the device compresses."""

import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core.overwritten import trained
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.planning.task import check, task_of

COPIES: dict[str, float] = json.loads(pathlib.Path(__file__).with_name("copies.json").read_text(encoding="utf-8"))
"""The time of one worker's round trip on a CPU, in copies of the gradient; ``benchmarks/planner.py --copies`` prints them."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Describes one worker's step without an exchange.

    Attributes:
        compute: seconds of the forward pass, the backward pass and the optimizer.
        shapes: shapes of the gradient's tensors.
        overlap: fraction of ``compute`` during which an exchange may run, in [0, 1]. 0 for steps in sequence; about two
            thirds if buckets of gradients leave during the backward pass; 1 for averages that may arrive late.
        memory: bytes that the step's program needs, if known.
        task: kind of the model, of :data:`gradcomp_jax.planning.task.TASKS`, which :meth:`of` finds by names and shapes;
            ``None`` if it is not known.
    """

    compute: float
    shapes: tuple[tuple[int, ...], ...]
    overlap: float = 0.0
    memory: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        """Refuses values that no step can have."""
        if not isinstance(self.shapes, (tuple, list)) or not all(isinstance(s, (tuple, list)) for s in self.shapes):
            raise TypeError(
                f"shapes must be the parameters' shapes, such as ((784, 10), (10,)), got {self.shapes!r}; Workload.of(params,"
                " compute) takes them from a tree"
            )
        # Lists are accepted, and made hashable for lookups by shapes.
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        _checks.number_of("seconds", "compute", self.compute)
        if not (self.compute >= 0 and math.isfinite(self.compute)):
            raise ValueError(f"compute must be finite and at least 0 seconds, got {self.compute}")
        _checks.number_of("parts of the computation", "overlap", self.overlap)
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be in [0, 1], a fraction of the computation, got {self.overlap}")
        if not self.values:
            raise ValueError("the model has no parameters: nothing would be exchanged")
        check(self.task, None)

    @classmethod
    def of(cls, params: PyTree, compute: float, *, overlap: float = 0.0, memory: int | None = None) -> "Workload":
        """Makes a workload from a tree of arrays or ``ShapeDtypeStruct``."""
        shapes = tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(trained(params)))
        return cls(compute, shapes, overlap, memory, task_of(params))

    @functools.cached_property
    def values(self) -> int:
        """Returns the number of entries of the gradient."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Device:
    """Says how fast a device compresses.

    Attributes:
        copy_rate: bytes a second that a copy reads and writes, together.
        copies: by method, the time of its arithmetic in copies of the gradient. For other methods :data:`COPIES` counts, or
            the time on this machine for one that is in neither.
    """

    copy_rate: float = 1e12
    copies: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses values that no device can have."""
        _checks.number_of("bytes per second", "copy_rate", self.copy_rate)
        if not self.copy_rate > 0:
            raise ValueError(f"copy_rate must be above 0 bytes per second, got {self.copy_rate}")

    def compression(self, method: str, values: int) -> float:
        """Returns the seconds to encode and decode this many float32 values."""
        copies = self.copies.get(method)
        if copies is None:
            copies = COPIES[method] if method in COPIES else _timed(method)
        return copies * 8 * values / self.copy_rate


@_arguments.checked
def profile_step(
    step: Callable[..., Any], args: Sequence[Any], *, params: PyTree = None, repeats: int = 5, overlap: float = 0.0
) -> Workload:
    """Times a step of one worker, and looks at its gradient and its memory.

    Example:
        >>> workload = gc.profile_step(jax.jit(jax.grad(loss)), (params, batch), params=params, repeats=1)
        >>> workload.shapes
        ((256,), (256, 256))

    Args:
        step: a step of one device, without an exchange; compiled if it is not. It may donate its arguments: it gets copies.
        args: the arguments of ``step``.
        params: the parameters, whose shapes the gradient has; by default ``args[0].params``, or ``args[0]``.
        repeats: timed calls, after one untimed call; the median is taken.
        overlap: see :class:`Workload`.

    Returns:
        A :class:`Workload`; ``compute`` is in seconds, ``memory`` in bytes.

    Raises:
        ValueError: for ``repeats`` below 1, and a step without parameters.
    """
    repeats = _checks.positive_int("repeats", repeats)
    if params is None:
        params = getattr(args[0], "params", args[0])
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    compiled = jitted.lower(*args).compile()
    times = [_seconds(compiled, args) for _ in range(repeats + 1)]
    return Workload.of(params, statistics.median(times[1:]), overlap=overlap, memory=_memory(compiled))


@functools.cache
def _timed(method: str) -> float:
    return profile_compression([method], values=2**22).copies[method]


def profile_compression(methods: Iterable[str] | None = None, *, values: int = 2**24, repeats: int = 5) -> Device:
    """Times methods on this device: one worker's round trip of a matrix, in copies of it, and a copy.

    Rounds are interleaved. A round trip encodes, decodes and keeps what was not sent. The additional work of an owner of a
    shard is not included.

    Args:
        methods: names in :data:`gradcomp_jax.methods.METHODS`; all by default.
        values: entries of the matrix, about. Fewer fit into caches, and into memory that the process keeps: a copy is then
            faster than any in a train step, and methods look slow in comparison.
        repeats: rounds; medians are kept.

    Raises:
        ValueError: for unknown methods, and ``repeats`` below 1.
    """
    names = list(METHODS if methods is None else methods)
    for name in names:
        _checks.one_of("method", name, METHODS)
    repeats = _checks.positive_int("repeats", repeats)
    gradient = jnp.asarray(np.random.default_rng(0).standard_normal((max(1, values // 1024), 1024)), jnp.float32)
    copy = jax.jit(lambda x: x * 2)
    runs: dict[str, Callable[[], float]] = {"": lambda: _seconds(copy, (gradient,))}
    for name in names:
        runs[name] = _round_trip(name, gradient)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            taken = run()
            if turn:
                times[name].append(taken)
    one = statistics.median(times[""])
    copies = {name: round(statistics.median(times[name]) / one, 3) for name in names}
    return Device(8 * gradient.size / one, copies)


def _round_trip(name: str, gradient: jax.Array) -> Callable[[], float]:
    tx = METHODS[name].build(axis_name=None)
    update = jax.jit(tx.update, donate_argnums=1)
    state = [jax.jit(tx.init)(gradient)]

    def run() -> float:
        start = time.perf_counter()
        _, state[0] = jax.block_until_ready(update(gradient, state[0], gradient))
        return time.perf_counter() - start

    return run


def _seconds(run: Callable[..., Any], args: Sequence[Any]) -> float:
    own = jax.block_until_ready(jax.tree.map(lambda a: jnp.copy(a) if isinstance(a, jax.Array) else a, tuple(args)))
    start = time.perf_counter()
    jax.block_until_ready(run(*own))
    return time.perf_counter() - start


def _memory(compiled: jax.stages.Compiled) -> int | None:
    """Returns the bytes of arguments, results and temporaries, less what shares memory; ``None`` if the compiler has none."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    return int(
        found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    )
