"""The work of a step and its device: computation, gradient, and how fast the device compresses."""

import dataclasses
import functools
import math
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
from gradcomp_jax.planning.platforms import ALL_REDUCED, PLATFORMS, Platform, here
from gradcomp_jax.planning.task import check, task_of

_SIMULATED = 4
"""Workers whose arithmetic is timed on one device. With as many, methods that can exchange in two phases do."""


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

    @property
    def tensors(self) -> int:
        """Returns the number of tensors that are compressed by default; vectors go dense, all together."""
        return sum(len(shape) > 1 for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Device:
    """Says how fast a device compresses.

    Attributes:
        copy_rate: bytes a second that a copy reads and writes, together; by default the platform's.
        copies: by method, the time of its arithmetic in copies of the gradient, where it was measured. For other methods the
            platform's figures count, at ``copy_rate``, or the time on this machine for one that has none.
        platform: a name in :data:`gradcomp_jax.planning.PLATFORMS`; by default that of the devices that JAX finds.
    """

    copy_rate: float | None = None
    copies: Mapping[str, float] = dataclasses.field(default_factory=dict)
    platform: str | None = None

    def __post_init__(self) -> None:
        """Refuses values that no device can have."""
        if self.copy_rate is not None:
            _checks.number_of("bytes per second", "copy_rate", self.copy_rate)
            if not self.copy_rate > 0:
                raise ValueError(f"copy_rate must be above 0 bytes per second, got {self.copy_rate}")
        if self.platform is not None:
            _checks.one_of("platform", self.platform, PLATFORMS)

    @classmethod
    def of(cls, device: "Device | str | None", measured: "Device | None" = None) -> "Device":
        """Returns a device that was named by its platform, or else what was measured, or else that of this machine."""
        return cls(platform=device) if isinstance(device, str) else device or measured or cls()

    @property
    def known(self) -> Platform:
        """Returns the platform."""
        return PLATFORMS[self.platform or here()[0]]

    @property
    def why(self) -> str:
        """Returns why it is this platform, if it was not named."""
        return "" if self.platform else here()[1]

    @property
    def rate(self) -> float:
        """Returns the bytes a second that a copy reads and writes."""
        return self.copy_rate or self.known.memory_rate

    def compression(self, method: str, values: int, tensors: int = 1, *, all_reduced: bool = False) -> float:
        """Returns the seconds to encode, reduce and decode this many float32 values in so many tensors.

        ``all_reduced`` is for dense bfloat16 in one all-reduce, where the platform has figures of that.
        """
        copies, known = self.copies.get(method), self.known
        if copies is None and method in known.methods:
            own = ALL_REDUCED if all_reduced and ALL_REDUCED in known.methods else method
            return known.seconds(own, values, tensors) * known.memory_rate / self.rate
        return (_timed(method) if copies is None else copies) * 8 * values / self.rate

    def basis(self, method: str) -> str:
        """Returns how the figures of a method were found: ``measured``, ``compiled``, ``estimated``, or ``timed here``."""
        if method in self.copies:
            return "measured"
        return self.known.how if method in self.known.methods else "timed here"


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


def profile_compression(
    methods: Iterable[str] | None = None, *, params: PyTree = None, values: int = 2**24, repeats: int = 5
) -> Device:
    """Times methods on this device: what one worker does in a step, in copies of the gradient, and a copy.

    The device does the work of four workers that exchange with each other, and a fourth of the time counts. So it includes what
    an owner does for its part of the rows: to decode what all have sent, to add it, and to encode the sum. What crosses between
    the workers is copied in this memory, and a sum of an all-reduce is added there. Rounds are interleaved.

    Args:
        methods: names in :data:`gradcomp_jax.methods.METHODS`; all by default.
        params: the parameters, arrays or shapes, of which there must be room for the gradients and the states of four workers;
            by default one matrix.
        values: entries of the matrices of all four, about. Fewer fit into caches, and into memory that the process keeps: a
            copy is then faster than any in a train step, and methods look slow in comparison.
        repeats: rounds; medians are kept.

    Raises:
        ValueError: for unknown methods, and ``repeats`` below 1.
    """
    names = list(METHODS if methods is None else methods)
    for name in names:
        _checks.one_of("method", name, METHODS)
    repeats = _checks.positive_int("repeats", repeats)
    if params is None:
        params = jax.ShapeDtypeStruct((max(1, values // (_SIMULATED * 1024)), 1024), jnp.float32)
    random = np.random.default_rng(0)
    gradients = jax.tree.map(
        lambda leaf: jnp.asarray(random.standard_normal((_SIMULATED, *leaf.shape), np.float32)), trained(params)
    )
    copy = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree))
    runs: dict[str, Callable[[], float]] = {"": lambda: _seconds(copy, (gradients,))}
    for name in names:
        runs[name] = _exchange(name, gradients)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            taken = run()
            if turn:
                times[name].append(taken)
    one = statistics.median(times[""])
    copies = {name: round(statistics.median(times[name]) / one, 3) for name in names}
    size = sum(leaf.size for leaf in jax.tree.leaves(gradients))
    return Device(8 * size / one, copies, here()[0])


def _exchange(name: str, gradients: PyTree) -> Callable[[], float]:
    tx = METHODS[name].build(axis_name="workers")
    each = functools.partial(jax.vmap, axis_name="workers")
    update = jax.jit(each(lambda gradient, state: tx.update(gradient, state, gradient)), donate_argnums=1)
    state = [jax.jit(each(tx.init))(gradients)]

    def run() -> float:
        start = time.perf_counter()
        _, state[0] = jax.block_until_ready(update(gradients, state[0]))
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
