"""What compilers must be told: which pass comes when, what is held in memory, and what is computed again.

An exchange reads each tensor in a few passes. None of them changes a number, and a compiler undoes them in six ways:

- It shares. Two passes that make the same target, or decode the same payload, would read one array, written and read again,
  which costs more than making it twice. :func:`held` and :func:`again` put a barrier before each pass. The compiler merges
  equal barriers too, so each has other arrays beside what it holds: those that the pass waits for (:func:`after`), repeated.
- It joins. One kernel of two buckets' passes waits for the last gradient: :class:`Bucket`.
- It goes side by side. XLA:TPU handles tensors together, each with its own temporaries: :class:`InTurn`.
- It copies. An array that is read after it is written anew is copied first: :func:`written_before`.
- It changes layouts. XLA:TPU copies rows that are matrices for each pass: :func:`held` and :func:`laid_out` do it once.
- It holds all that a stride spans, on TPU: :func:`places` and :func:`taken` read a sample in runs where that is too much.

In the exchange a pass is a ``with`` block; the arrays it waits for are not passed down.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _compat, kernels
from gradcomp_jax import collectives as co
from gradcomp_jax._typing import Array
from gradcomp_jax.core.layout import Group
from gradcomp_jax.memory import Memory

WINDOW = 3 * 2**22
"""Largest stride, in bytes, for which lines are taken by one slice. XLA:TPU (libtpu 0.0.42) holds all that a stride spans in
vector memory, and a stride that does not fit there, 16 MiB on v5e and v5p, does not compile."""
RUNS = 8
"""Number of runs in which lines are taken where a stride would be longer."""
NARROW = 1024
"""Entries that a shorter line, or an entry of a vector, counts as: on TPU they lie across, and fail at shorter strides."""
MOST_JOINED = 64
"""Arrays that are joined in one expression."""
SIDE_BY_SIDE = 8
"""Most lines of the earlier axes that lie in one tile with a line; a stride spans them too."""


T = TypeVar("T")


class _Pass:
    """Holds what the pass that is traced now waits for, and how often it has decoded."""

    def __init__(self, waits_for: list[Array]) -> None:
        self.waits_for = waits_for
        self.decoded = 0


_now: contextvars.ContextVar[_Pass | None] = contextvars.ContextVar("pass", default=None)


@contextlib.contextmanager
def after(*arrays: Any) -> Iterator[None]:
    """Begins a pass that waits for the leaves of some trees, and for those of the pass around it."""
    around = _now.get()
    begun = _now.set(_Pass([*(around.waits_for if around else ()), *jax.tree.leaves(arrays)]))
    try:
        yield
    finally:
        _now.reset(begun)


def held(group: Group, read: Any) -> Any:
    """Returns what a target is made of, held for the pass that makes it."""
    now = _now.get()
    waits_for = now.waits_for if now else []
    if group.compressor.block == 1 and not group.memory.keeps:
        return read_once((read, waits_for))[0]
    if group.compressor.row_shape is not None:
        return _held_as_matrices(group, read, waits_for)
    return lax.optimization_barrier((read, waits_for))[0]


def _held_as_matrices(group: Group, read: Any, waits_for: Any) -> Any:
    def as_they_are(read: Any, waits_for: Any) -> Any:
        return lax.optimization_barrier((read, waits_for))[0]

    matrices = functools.partial(_as_matrices, group)
    return lax.platform_dependent(read, waits_for, tpu=matrices, default=as_they_are)


def read_once(read: Any) -> Any:
    """Returns rows of one entry without a memory, which are read in one pass, over any shape that the compiler chooses."""
    return kernels.held_on_cpu(read)


def again(payload: Any) -> Any:
    """Returns a payload that each use decodes again: an array that passes share would be held.

    On TPU decoding changes the layout, which costs more than holding the array: there all uses share it.
    """
    now = _now.get()
    if now is None:
        return payload
    now.decoded += 1
    differs = tuple({name for array in now.waits_for for name in _compat.varying_names(array)})

    def held(payload: Any, *waits_for: Any) -> Any:
        return lax.optimization_barrier((payload, waits_for))[0]

    def for_tpu(payload: Any, *waits_for: Any) -> Any:
        return _compat.varying(held(payload, *waits_for[:1]), differs or None)

    return lax.platform_dependent(payload, *now.waits_for * now.decoded, tpu=for_tpu, default=held)


def laid_out(group: Group, new: Any) -> Any:
    """Returns a new memory of rows that are matrices, which TPU computes in their shape."""
    return lax.platform_dependent(new, tpu=lambda new: _as_matrices(group, new, ()), default=lambda new: new)


def _as_matrices(group: Group, tree: Any, waits_for: Any) -> Any:
    """Returns arrays of rows, held as matrices: TPU copies between the two layouts, here once and not for each pass."""
    shape = group.compressor.row_shape or ()

    def laid(a: Array) -> Array:
        return a.reshape(-1, *shape) if a.ndim == 2 and a.shape[1] == math.prod(shape) else a

    held = lax.optimization_barrier((jax.tree.map(laid, tree), waits_for))[0]
    return jax.tree.map(lambda a, b: a.reshape(b.shape), held, tree)


class Bucket:
    """Makes a bucket's targets wait for the payloads of the bucket before, entry by entry, which costs no pass."""

    def __init__(self, payloads_before: Sequence[Any]) -> None:
        """Takes the payloads of the bucket before, none for the first."""
        self._there = co.are_there(jax.tree.leaves(payloads_before)) if payloads_before else None

    def parts(self, memory: Memory, gradient: Array, kept: Any) -> kernels.Parts | None:
        """Returns what a target is made of, for a kernel that makes it; ``None`` where that takes more than its entries."""
        arrays, tree = jax.tree.flatten((gradient, kept))
        if self._there is not None or not memory.in_a_kernel or {a.dtype.name for a in arrays} != {"float32"}:
            return None
        return kernels.Parts(tuple(arrays), lambda *a: memory.compensate(*jax.tree.unflatten(tree, a))[0])

    def in_turn(self, target: Array) -> Array:
        """Returns the target, complete only once the payloads before are there."""
        return target if self._there is None else jnp.where(self._there, target, 0.0)


class InTurn:
    """Takes tensors one after the other on TPU: updates after updates, memories after memories.

    Attributes:
        update: whether the exchange took place, known once the updates before are there.
        memory: the same, known once the memories before are there.
    """

    def __init__(self, ok: Array) -> None:
        """Begins with the verdict, a boolean scalar."""
        self.update = self.memory = ok

    def made_update(self, update: Array) -> None:
        """Lets the next tensor's update follow this one."""
        self.update = kernels.follows_on_tpu(self.update, update)

    def made_memory(self, memory: Any) -> None:
        """Lets the next tensor's memory follow this one."""
        self.memory = kernels.follows_on_tpu(self.memory, jax.tree.leaves(memory)[0])


def wait(arrays: list[Array], there: Sequence[Array]) -> list[Array]:
    """Returns a bucket's arrays, complete only once those of the bucket before are there; see :func:`co.wait`."""
    return co.wait(arrays, there) if there else arrays


def written_before(ok: Array, written: Array) -> Array:
    """Returns ``ok``, known on CPU only once an array is written; the other backends write all arrays in one pass."""
    return ok & lax.platform_dependent(written.reshape(-1)[0], cpu=_known, default=_always)


def _known(first: Array) -> Array:
    """Returns true for every number: a dependence that the compiler cannot fold away, because a NaN differs from itself.

    Integers are symmetric here and never have their dtype's least value, which the compiler does not know.
    """
    if jnp.issubdtype(first.dtype, jnp.integer):
        return first != jnp.iinfo(first.dtype).min
    return first == first


def _always(first: Array) -> Array:
    """Returns true, with the same varying axes as :func:`_known`."""
    return (first == first) | True


def places(shape: Sequence[int], stride: int, axis: int = 0) -> list[slice]:
    """Returns which lines of a float32 array to take along an axis: every ``stride``-th, or about as many in some runs."""
    n = shape[axis]
    line = 4 * max(math.prod(shape[axis + 1 :]), NARROW) * min(math.prod(shape[:axis]), SIDE_BY_SIDE)
    if stride == 1 or stride * line <= WINDOW:
        return [slice(None, None, stride)]
    lines = -(-n // stride)
    runs = min(RUNS, lines)
    return [slice(start, start + lines // runs) for start in (i * n // runs for i in range(runs))]


def taken(x: Array, where: Sequence[Sequence[slice]]) -> Array:
    """Returns the lines at the :func:`places` of each of the leading axes."""
    for axis, runs in enumerate(where):
        if len(runs) > 1:
            before = (slice(None),) * axis
            x = jnp.concatenate([x[(*before, run)] for run in runs], axis)
    return x[tuple(runs[0] if len(runs) == 1 else slice(None) for runs in where)]


def side_by_side(together: Callable[[], T], apart: Callable[[], T]) -> T:
    """Returns ``together()`` on GPU, where a small array costs what launching its kernels does, and ``apart()`` elsewhere."""
    return lax.platform_dependent(cuda=together, rocm=together, default=apart)


def in_memory(tree: T) -> T:
    """Returns arrays that are held, before they are cut into parts: each part would compute its own."""
    return lax.optimization_barrier(tree)


def joined(vectors: Sequence[Array]) -> Array:
    """Returns one vector of many, in memory: XLA would reduce each by itself, and its kernels take up to 96 arrays."""
    some = [jnp.concatenate(vectors[i : i + MOST_JOINED]) for i in range(0, len(vectors), MOST_JOINED)]
    return jnp.concatenate(lax.optimization_barrier(some)) if len(some) > 1 else lax.optimization_barrier(some[0])
