"""What the collectives of a mesh take, measured with a few of them, and kept."""

import dataclasses
import functools
import itertools
import json
import math
import os
import reprlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._files import read_json, write_whole
from gradcomp_jax._typing import Array
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.planning.fitting import Fit, Point, fit
from gradcomp_jax.planning.workload import Device, profile_compression

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
SIZES = tuple(2**k for k in (10, 13, 16, *range(18, 26)))
"""Bytes that one device sends: 1 KiB to 32 MiB, from 256 KiB on twice as many each: there windows open and protocols change."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured times of collectives among so many workers, and the lines through them.

    Attributes:
        workers: devices along the axis.
        fits: by kind of collective, as :func:`gradcomp_jax.wire_bytes` names them.
        device: how fast one of them compresses, if that was measured.
    """

    workers: int
    fits: Mapping[str, Fit]
    device: Device | None = None

    def seconds(self, kind: str, sent: float) -> float:
        """Returns what one collective takes in which each device sends that many bytes.

        Raises:
            ValueError: for a kind that was not measured.
        """
        fitted = self.fits.get(like(kind))
        if fitted is None:
            raise ValueError(f"nothing is known of {kind}: calibrate(mesh, kinds=[..., {like(kind)!r}])")
        return fitted.seconds(sent)

    def refuse_other_workers(self, workers: int) -> None:
        """Refuses to be used where another number of workers exchange.

        Raises:
            ValueError: if it was made of another number.
        """
        if self.workers != workers:
            raise ValueError(
                f"the calibration is of {self.workers} workers, and {workers} exchange here: calibrate as many, or leave it out"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON.

        Raises:
            OSError: where it cannot be written; a file that was there stays as it was.
        """
        write_whole(path, json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold. The errors of the lines are there to be read, and are not read back."""
        return {
            "workers": self.workers,
            "fits": {
                kind: {
                    "alpha_s": found.alpha,
                    "beta_s_per_byte": found.beta,
                    "median_error": found.errors[0],
                    "worst_error": found.errors[1],
                    "points": [list(point) for point in found.points],
                }
                for kind, found in self.fits.items()
            },
            "device": dataclasses.asdict(self.device) if self.device else None,
        }

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> "Calibration":
        """Reads what :meth:`as_dict` returned.

        Raises:
            ValueError: for what is no calibration: another key, a text, or a number that no measurement gives.
        """
        try:
            return cls(
                _checks.positive_int("workers", kept["workers"]),
                {_checks.one_of("kind", kind, KINDS): _read_fit(kind, one) for kind, one in kept["fits"].items()},
                _read_device(kept["device"]) if kept.get("device") else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"this is no calibration ({what}): make one with calibrate(mesh).save(path)") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Reads what :meth:`save` has written.

        Raises:
            ValueError: for a file that is no calibration.
            OSError: where there is none, what is there is no file, or it has more than 16 MiB.
        """
        return cls.from_dict(read_json(path))


def _read_fit(kind: str, kept: Mapping[str, Any]) -> Fit:
    if any(len(point) != len(Point._fields) for point in kept["points"]):
        raise ValueError(f"a point of {kind} must be four numbers: {', '.join(Point._fields)}")
    points = tuple(Point(*(_number(f"a point of {kind}", number) for number in point)) for point in kept["points"])
    if not points or any(one.sent >= other.sent for one, other in itertools.pairwise(points)):
        raise ValueError(f"the points of {kind} must be of sizes that rise, at least one")
    if not all(point.sent > 0 and point.seconds > 0 for point in points):
        raise ValueError(f"the bytes and the seconds of {kind} must be above 0")
    alpha, beta = (_number(f"{name} of {kind}", kept[name]) for name in ("alpha_s", "beta_s_per_byte"))
    return Fit(alpha, beta, points)


def _read_device(kept: Mapping[str, Any]) -> Device:
    copies = {
        _checks.one_of("method", name, METHODS): _number(f"copies of {name}", number)
        for name, number in kept["copies"].items()
    }
    return Device(_number("copy_rate", kept["copy_rate"]), copies)


def _number(name: str, value: Any) -> float:
    """Returns a number that may be measured. Of Python's numbers a truth value is one, and of JSON's NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {reprlib.repr(value)}")
    return float(value)


@_arguments.checked
def calibrate(
    mesh: Mesh,
    *,
    axis_name: str,
    kinds: Sequence[str] = KINDS,
    sizes: Sequence[int] = SIZES,
    repeats: int = 3,
    longest: float = 1.0,
    pause: float = 0.1,
    methods: Iterable[str] | None = None,
) -> Calibration:
    """Measures what collectives take along an axis, with a few of them, and how fast a device compresses.

    All devices pause, as a step computes between two exchanges; then they run a program without the collective, and at once
    the same program with it: the difference is the collective's. Without pauses it meets in the links' queues what the last one
    has left there. What one worker waits for another, that one has less to wait: the mean over all processes counts, and
    all have the same calibration. Every process of ``mesh`` must call it.

    Args:
        mesh: of all devices.
        axis_name: along which gradients are exchanged; along the others, every line of devices does the same at once.
        kinds: of :data:`KINDS`.
        sizes: bytes that one device sends in a collective, ascending.
        repeats: of each measurement, fewer where they would take longer than ``longest`` in all; medians are kept.
        longest: seconds; sizes that would take longer, by the two before, are left out.
        pause: seconds before each collective. Best as long as your step computes: TCP, unless ``tcp_slow_start_after_idle`` is
            off, starts slowly again on a connection that has been silent for longer than some 200 ms and a round trip.
        methods: whose arithmetic to time, see :func:`gradcomp_jax.planning.profile_compression`: all by default, which takes
            about a minute; ``()`` for none.

    Returns:
        Times and lines by kind.

    Raises:
        ValueError: for an axis that the mesh does not have, or of one device; for fewer than two sizes, unknown kinds,
            ``repeats`` below 1, or a pause below 0.

    References:
        Hockney, 1994, The communication challenge for MPP (latency and bandwidth from times of messages of many sizes).
    """
    _checks.one_of("axis_name", axis_name, mesh.axis_names)
    repeats = _checks.positive_int("repeats", repeats)
    if not (pause >= 0 and math.isfinite(pause)):
        raise ValueError(f"pause must be seconds of at least 0, got {pause}: give what your step computes for, or 0")
    workers = mesh.shape[axis_name]
    if workers < 2:
        raise ValueError(f"axis {axis_name!r} has one device, which sends nothing: calibrate an axis of at least 2")
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes must be at least two, for a line, got {list(sizes)}")
    for kind in kinds:
        _checks.one_of("kind", kind, KINDS)
    each = functools.partial(_points, mesh, axis_name, sorted(set(sizes)), repeats, longest, pause)
    fits = {kind: fit(each(kind)) for kind in kinds}
    names = METHODS if methods is None else tuple(methods)
    return Calibration(workers, fits, profile_compression(names) if names else None)


def _points(
    mesh: Mesh, axis: str, sizes: Sequence[int], repeats: int, longest: float, pause: float, kind: str
) -> list[Point]:
    points: list[Point] = []
    for size in sizes:
        # By what all have found before: all processes must agree on what they run.
        expected = fit(points).seconds(size) if len(points) > 1 else 0.0
        if expected > longest:
            break
        count = max(1, round(min(repeats, longest / max(pause + expected, 1e-9))))
        run, sent = _program(mesh, axis, kind, size)
        # It compiles, and what the network keeps from a step to the next is there.
        run(1)
        taken = []
        for _ in range(count):
            time.sleep(pause)
            without = _timed(run, 0)
            taken.append(_timed(run, 1) - without)
        each = [max(t, 1e-7) for t in mean_of_processes(mesh, taken)]
        points.append(Point(sent, statistics.median(each), min(each), max(each)))
    return points


def _program(mesh: Mesh, axis: str, kind: str, size: int) -> tuple[Callable[[int], Any], int]:
    """``run(count)``: so many collectives, each after the last; and the bytes that one device sends in one."""
    workers = mesh.shape[axis]
    operand, sent = _entries(kind, size, workers)
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    @functools.partial(jax.jit, out_shardings=sharding)
    def start() -> Array:
        return jnp.ones((workers * operand,), jnp.float32)

    once = functools.partial(_once, kind, axis, workers)

    def body(count: Array, x: Array) -> Array:
        return lax.fori_loop(0, count, lambda _, x: once(x), x)

    mapped = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axis)),
            out_specs=PartitionSpec(axis),
            check_vma=False,
        )
    )
    x = jax.block_until_ready(start())
    return lambda count: jax.block_until_ready(mapped(np.int32(count), x)), sent


def _entries(kind: str, size: int, workers: int) -> tuple[int, int]:
    """Float32 entries of an operand of which one device sends about ``size`` bytes, and how many bytes that is."""
    fraction = {
        "all-reduce": 2 * (workers - 1) / workers,
        "all-gather": workers - 1,
        "all-to-all": (workers - 1) / workers,
        "collective-permute": 1.0,
    }[kind]
    entries = max(1, round(size / (4 * fraction * workers))) * workers
    return entries, round(4 * entries * fraction)


def _once(kind: str, axis: str, workers: int, x: Array) -> Array:
    """One collective, whose result has the shape of its operand."""
    if kind == "all-reduce":
        return lax.psum(x, axis) / workers
    if kind == "all-gather":
        # All of it must arrive before a part is taken.
        return lax.optimization_barrier(lax.all_gather(x, axis))[workers - 1]
    if kind == "all-to-all":
        return lax.all_to_all(x.reshape(workers, -1), axis, 0, 0).reshape(-1)
    return lax.ppermute(x, axis, [(i, (i + 1) % workers) for i in range(workers)])


def _timed(run: Callable[[int], Any], count: int) -> float:
    start = time.perf_counter()
    run(count)
    return time.perf_counter() - start


def mean_of_processes(mesh: Mesh, seconds: Sequence[float]) -> list[float]:
    """Averages the numbers of all processes, entry by entry, to the same result in every process."""
    if jax.process_count() == 1:
        return list(seconds)
    every = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, every)
    own = np.asarray(seconds, np.float32)[None]
    shape = (mesh.size, own.shape[1])
    rows = jax.make_array_from_callback(shape, sharding, lambda index: np.broadcast_to(own, (1, own.shape[1])))
    mean = jax.shard_map(
        lambda row: lax.pmean(row, mesh.axis_names),
        mesh=mesh,
        in_specs=every,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = jax.jit(mean)(rows)
    return [float(t) for t in np.asarray(found.addressable_data(0))[0]]


def like(kind: str) -> str:
    """Returns the kind that is measured: a reduce-scatter is as an all-to-all, each device sends every other its part."""
    return "all-to-all" if kind == "reduce-scatter" else kind
