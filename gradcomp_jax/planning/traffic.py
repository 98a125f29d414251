"""What a method sends in a step: read from its program, or from a record of what programs of all methods sent."""

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _checks
from gradcomp_jax._typing import PyTree
from gradcomp_jax.collectives.auto import MOST_RIDING
from gradcomp_jax.methods.lowered import lowered_bytes, state_bytes
from gradcomp_jax.methods.registry import METHODS

RECORD = "record.json"
COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of workers whose programs the record has."""

_SHAPE = (4096, 1024)
_OTHER = (2048, 2048)
# Tensors below a row of entries are not worth a code of their own.
_SMALL = 1024


class Crossing(NamedTuple):
    """Collectives of one kind in a step. Attributes: kind, how many, and the bytes that one device sends in all of them."""

    kind: str
    launches: int
    sent: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one worker sends in a step, and what it keeps.

    Attributes:
        crossings: one after the other.
        state: bytes that stay on each worker.
    """

    crossings: tuple[Crossing, ...]
    state: float

    @property
    def sent(self) -> float:
        """Bytes of all crossings."""
        return sum(c.sent for c in self.crossings)


def read(make: Callable[..., optax.GradientTransformation], params: PyTree, workers: int) -> Traffic:
    """Reads the program of a transformation, lowered for ``workers`` workers: exact, in about half a second.

    Args:
        make: ``make(axis_name=...)``, for instance ``functools.partial(gc.dgc, density=0.01)``.
        params: arrays or ``ShapeDtypeStruct``.
        workers: N; a single one sends nothing.
    """
    if _checks.positive_int("workers", workers) == 1:
        return Traffic((), 0)
    tx = make(axis_name="workers")
    kinds = lowered_bytes(tx, params, workers).by("kind")
    crossings = tuple(Crossing(kind, total.count, total.sent) for kind, total in kinds.items())
    return Traffic(crossings, state_bytes(tx, params, workers))


@functools.lru_cache(maxsize=4096)
def look_up(method: str, shapes: tuple[tuple[int, ...], ...], workers: int) -> Traffic:
    """Looks a method up in the record, which has those of :data:`gradcomp_jax.methods.METHODS` with their defaults.

    The programs of a method that the record lacks are read once in a process, in some seconds.

    Bytes are those of one matrix, for each entry or, of methods that factor matrices, for each of their sides. Tensors of
    fewer than two dimensions or 1,024 entries, and those that a factorization does not make smaller, are taken to go dense.

    Args:
        method: its name.
        shapes: of all tensors.
        workers: N, up to 1,024; between two numbers in the record the larger one's bytes, by the share that N workers send.

    Raises:
        ValueError: for an unknown method, and more workers than were recorded.
    """
    _checks.one_of("method", method, METHODS)
    if _checks.positive_int("workers", workers) == 1:
        return Traffic((), 0)
    if workers > COUNTS[-1]:
        raise ValueError(f"workers must be at most {COUNTS[-1]} for the record, got {workers}: use traffic.read")
    among = next(n for n in COUNTS if n >= workers)
    one = recorded().get(method) or _read_anew(method, among)
    kept = one["workers"][str(among)]
    coded, dense = _units(shapes, one["rank"])
    crossings = [Crossing(kind, count, sent * coded) for kind, count, sent in kept["crossings"]] if coded else []
    if dense:
        # Few values ride along with a payload, as they did in the record; many have a sum of their own.
        rides = coded and dense <= MOST_RIDING
        extra: Any = kept["vector"] if rides else [("all-reduce", 1, 8 * (among - 1) / among)]
        crossings = _joined(crossings, [Crossing(kind, count, sent * dense) for kind, count, sent in extra])
    # Whoever only gathers sends its own payload to each of the others; otherwise each sends the others their share.
    gathers = not any(c.kind == "all-to-all" for c in crossings)
    share = (workers - 1) / workers * among / (among - 1)
    fewer = {"all-gather": (workers - 1) / (among - 1) if gathers else share}
    values = sum(math.prod(shape) for shape in shapes)
    return Traffic(tuple(c._replace(sent=fewer.get(c.kind, share) * c.sent) for c in crossings), kept["state"] * values)


@functools.cache
def recorded() -> dict[str, Any]:
    """The record, as :func:`make_record` made it."""
    text = importlib.resources.files(__package__).joinpath(RECORD).read_text()
    return json.loads(text)["methods"]


@functools.cache
def _read_anew(name: str, workers: int) -> dict[str, Any]:
    return _recorded(name, (workers,))


def make_record(names: Sequence[str] = tuple(METHODS), counts: Sequence[int] = COUNTS) -> dict[str, Any]:
    """Reads the programs of methods: what the record has of them, by name."""
    return {name: _recorded(name, counts) for name in names}


def _recorded(name: str, counts: Sequence[int]) -> dict[str, Any]:
    make = METHODS[name].build
    matrix, other = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (_SHAPE, _OTHER))
    vector = jax.ShapeDtypeStruct((_SMALL,), jnp.float32)
    # Two matrices of as many entries: only a factorization sends less of the square one.
    sent = read(make, matrix, 2).sent
    factors = read(make, other, 2).sent < 0.9 * sent
    # Both factors are summed, and of two workers each sends all of both: 4 bytes x rank for each side.
    rank = round(sent / 4 / sum(_SHAPE)) if factors else 0
    unit = sum(_SHAPE) if factors else math.prod(_SHAPE)
    found: dict[str, Any] = {}
    for n in counts:
        alone, both = read(make, [matrix], n), read(make, [matrix, vector], n)
        found[str(n)] = {
            "state": _round(alone.state / math.prod(_SHAPE)),
            "crossings": [[c.kind, c.launches, _round(c.sent / unit)] for c in alone.crossings],
            "vector": [[c.kind, c.launches, _round(c.sent / _SMALL)] for c in _less(both.crossings, alone.crossings)],
        }
    return {"rank": rank, "workers": found}


def _units(shapes: Sequence[tuple[int, ...]], rank: int) -> tuple[int, int]:
    """How many entries are coded (with a rank, how many sides of matrices), and how many entries go dense."""
    coded, dense = 0, 0
    for shape in shapes:
        size = math.prod(shape)
        sides = size // shape[-1] + shape[-1] if len(shape) > 1 and size else 0
        gains = rank * sides < size if rank else size >= _SMALL
        if len(shape) < 2 or not gains:
            dense += size
        else:
            coded += sides if rank else size
    return coded, dense


def _joined(crossings: Sequence[Crossing], more: Sequence[Crossing]) -> list[Crossing]:
    """Adds what crosses besides, to collectives of the same kind where there are any."""
    found = {c.kind: c for c in crossings}
    for c in more:
        own = found.get(c.kind, Crossing(c.kind, 0, 0.0))
        found[c.kind] = Crossing(c.kind, own.launches + (c.launches if c.kind not in found else 0), own.sent + c.sent)
    return list(found.values())


def _less(both: Sequence[Crossing], alone: Sequence[Crossing]) -> list[Crossing]:
    """What one has more than the other, by kind."""
    before = {c.kind: c for c in alone}
    none = Crossing("", 0, 0.0)
    more = [(c, before.get(c.kind, none)) for c in both]
    return [Crossing(c.kind, c.launches - b.launches, c.sent - b.sent) for c, b in more if c.sent > b.sent]


def _round(value: float) -> float:
    return float(f"{value:.6g}")
