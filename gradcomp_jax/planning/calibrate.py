"""Measures how long the collectives of a mesh take, with a few of them, and keeps the result."""

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

from gradcomp_jax import _arguments, _checks, _specs
from gradcomp_jax._files import read_json, write_whole
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.planning.fitting import Fit, Point, fit
from gradcomp_jax.planning.workload import Device, profile_compression

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
SIZES = tuple(2**k for k in (10, 13, 16, *range(18, 26)))
"""Bytes that one device sends: 1 KiB to 32 MiB, doubling from 256 KiB up, where windows open and protocols change."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Holds measured times of collectives among a number of workers, and the lines through them.

    Attributes:
        workers: devices along the axis.
        fits: by kind of collective, as :func:`gradcomp_jax.wire_bytes` names them.
        device: how fast one of them compresses, if that was measured.
    """

    workers: int
    fits: Mapping[str, Fit]
    device: Device | None = None

    def seconds(self, kind: str, sent: float) -> float:
        """Returns the seconds of one collective in which each device sends ``sent`` bytes.

        Raises:
            ValueError: for a kind that was not measured.
        """
        fitted = self.fits.get(like(kind))
        if fitted is None:
            raise ValueError(f"nothing is known of {kind}: calibrate(mesh, kinds=[..., {like(kind)!r}])")
        return fitted.seconds(sent)

    def refuse_other_workers(self, workers: int) -> None:
        """Refuses to be used for another number of workers.

        Raises:
            ValueError: if the calibration was made with another number.
        """
        if self.workers != workers:
            raise ValueError(
                f"the calibration is of {self.workers} workers, and {workers} exchange here: calibrate as many, or leave it out"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration as JSON.

        Raises:
            OSError: if the file cannot be written; an earlier file is then unchanged.
        """
        write_whole(path, json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict that JSON can hold. It has the errors of the lines for the reader; :meth:`from_dict` ignores them."""
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
            ValueError: for anything but a calibration: another key, a text, or a number that no measurement gives.
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
            ValueError: for a file that is not a calibration.
            OSError: if there is no file, the path is not a file, or the file has more than 16 MiB.
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
    rate = kept["copy_rate"]
    return Device(None if rate is None else _number("copy_rate", rate), copies, kept.get("platform"))


def _number(name: str, value: Any) -> float:
    """Returns a number if a measurement could give it. Python counts a bool as a number, and JSON a NaN: both are refused."""
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
    params: PyTree = None,
) -> Calibration:
    """Measures what collectives take along an axis, with a few of them, and how fast a device compresses.

    All devices pause, as a step computes between two exchanges. Then they run a program without the collective, and at once
    the same program with it: the difference is the collective's time. Without pauses, a collective would wait for what the last
    one has left in the links' queues. When one worker waits for another, the other waits less, so times are averaged over all
    processes, and all have the same calibration. Every process of ``mesh`` must call this.

    Example:
        >>> link = gc.calibrate(mesh, axis_name="data", kinds=("all-reduce",), sizes=(1024, 8192), repeats=1, methods=())
        >>> link.workers
        8

    Args:
        mesh: the mesh of all devices.
        axis_name: the axis along which gradients are exchanged; all lines of devices along it measure at the same time.
        kinds: kinds of collectives, of :data:`KINDS`.
        sizes: bytes that one device sends in a collective, ascending.
        repeats: repetitions of each measurement, fewer if they would take longer than ``longest`` in all; medians are kept.
        longest: seconds; sizes that would take longer, judging by smaller ones, are left out.
        pause: seconds before each collective. Best as long as your step computes: unless ``tcp_slow_start_after_idle`` is off,
            TCP starts slowly again on a connection that has been silent for longer than about 200 ms and a round trip.
        methods: methods whose arithmetic to time, see :func:`gradcomp_jax.planning.profile_compression`: all by default, which
            takes about a minute; ``()`` for none.
        params: the parameters, on whose shapes to time them; by default one matrix. The first device has room for the gradients
            and states of four workers.

    Returns:
        Times and lines by kind.

    Raises:
        ValueError: for an axis that the mesh does not have, or with one device; for fewer than two sizes, unknown kinds,
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
    return Calibration(workers, fits, profile_compression(names, params=params) if names else None)


def _points(
    mesh: Mesh, axis: str, sizes: Sequence[int], repeats: int, longest: float, pause: float, kind: str
) -> list[Point]:
    points: list[Point] = []
    for size in sizes:
        # Judged by the times that all processes share, because they must agree on what they run.
        expected = fit(points).seconds(size) if len(points) > 1 else 0.0
        if expected > longest:
            break
        count = max(1, round(min(repeats, longest / max(pause + expected, 1e-9))))
        run, sent = _program(mesh, axis, kind, size)
        # This compiles it, and sets up the network state that lasts from one step to the next.
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
    """Returns ``run(count)``, which runs ``count`` collectives in sequence, and the bytes that one device sends in one."""
    workers = mesh.shape[axis]
    operand, sent = _entries(kind, size, workers)
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    @functools.partial(jax.jit, out_shardings=sharding)
    def start() -> Array:
        return jnp.ones((workers * operand,), jnp.float32)

    once = functools.partial(_once, kind, axis, workers)

    def body(count: Array, x: Array) -> Array:
        return lax.fori_loop(0, count, lambda _, x: once(x), x)

    along = PartitionSpec(axis)
    mapped = jax.jit(_specs.mapped(body, mesh, mesh.axis_names, (PartitionSpec(), along), along, check_vma=False))
    x = jax.block_until_ready(start())
    return lambda count: jax.block_until_ready(mapped(np.int32(count), x)), sent


def _entries(kind: str, size: int, workers: int) -> tuple[int, int]:
    """Returns the float32 entries of an operand of which one device sends about ``size`` bytes, and the exact bytes."""
    fraction = {
        "all-reduce": 2 * (workers - 1) / workers,
        "all-gather": workers - 1,
        "all-to-all": (workers - 1) / workers,
        "collective-permute": 1.0,
    }[kind]
    entries = max(1, round(size / (4 * fraction * workers))) * workers
    return entries, round(4 * entries * fraction)


def _once(kind: str, axis: str, workers: int, x: Array) -> Array:
    """Runs one collective, whose result has the shape of its operand."""
    if kind == "all-reduce":
        return lax.psum(x, axis) / workers
    if kind == "all-gather":
        # The whole result must arrive before a part of it is taken.
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
    names = mesh.axis_names
    mean = _specs.mapped(lambda row: lax.pmean(row, names), mesh, names, every, PartitionSpec(), check_vma=False)
    found = jax.jit(mean)(rows)
    return [float(t) for t in np.asarray(found.addressable_data(0))[0]]


def like(kind: str) -> str:
    """Returns the kind that is measured: a reduce-scatter counts as an all-to-all, since both send each device its part."""
    return "all-to-all" if kind == "reduce-scatter" else kind
