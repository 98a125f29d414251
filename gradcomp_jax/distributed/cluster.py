"""Joins this process to the others, by arguments, by the environment, or by what JAX detects."""

import dataclasses
import os
from collections.abc import Mapping
from typing import NoReturn

import jax

from gradcomp_jax._errors import SettingError
from gradcomp_jax.distributed.address import ClusterError, check
from gradcomp_jax.distributed.agreement import check_equal
from gradcomp_jax.distributed.exit_notice import ExitNotice
from gradcomp_jax.distributed.meeting import meet
from gradcomp_jax.distributed.surroundings import surroundings
from gradcomp_jax.distributed.tcp_timeouts import keep_connections

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
_START_TIMEOUT_S = 300
# Process 0 writes the results while the others wait to end with it.
_SHUTDOWN_TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Says where this process belongs in the cluster; JAX detects what is ``None``.

    Attributes:
      coordinator: ``host:port`` of process 0.
      index: of this process, from 0.
      count: of all processes.
    """

    coordinator: str | None = None
    index: int | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked before other processes are asked.

        Raises:
          SettingError: for an address without a port, or an index outside of the count.
        """
        if self.coordinator is not None:
            check("the coordinator", self.coordinator)
        if self.count is not None and self.count < 1:
            raise SettingError(f"the number of processes must be at least 1, got {self.count}")
        if self.index is not None and (self.index < 0 or (self.count is not None and self.index >= self.count)):
            limit = "" if self.count is None else f" and below the {self.count} processes"
            raise SettingError(f"the process id must be at least 0{limit}, got {self.index}")


def find_place(
    coordinator: str | None = None,
    index: int | None = None,
    count: int | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> Place:
    """Returns the place from the arguments, and from the environment where an argument is missing.

    Raises:
      SettingError: if a value makes no sense.
    """
    _check_devices(environment.get(DEVICES, ""))
    return Place(
        coordinator or environment.get(ADDRESS) or None,
        _number(INDEX, environment) if index is None else index,
        _number(COUNT, environment) if count is None else count,
    )


def join(place: Place, *, heartbeat_timeout: int = 100) -> None:
    """Starts ``jax.distributed``; afterwards ``jax.devices()`` are the devices of all processes.

    If ``place`` is complete, the processes first meet at the coordinator's address over plain sockets, and JAX's service then
    listens at that address only. This meeting finds a count that differs, an index that is taken, an unknown host and an
    address that another run uses, before JAX aborts over them. Once JAX is started, the processes compare their versions,
    flags and source.

    Args:
      place: where this process belongs.
      heartbeat_timeout: seconds without a heartbeat from a process until the others give up.

    Raises:
      SettingError: if neither the arguments, the environment nor the cluster say where this process belongs; if processes
        contradict each other about their count or indices, or differ in versions, flags or source; if the coordinator's host
        is unknown.
      ClusterError: if the processes do not find each other, or the port is taken.
    """
    bind = None
    if place.coordinator is not None and place.index is not None and place.count is not None:
        bind = meet(place.coordinator, place.index, place.count, timeout=_START_TIMEOUT_S)
    # With the preemption service SIGTERM would only be recorded, and a cancelled job would continue.
    jax.config.update("jax_enable_preemption_service", False)
    where = f" at {place.coordinator}" if place.coordinator else ""
    failure = f"the processes did not come together{where}"
    # If one process does not come, JAX ends the others.
    notice = ExitNotice(f"gradcomp: {failure}: start all of them, and make sure that they reach process 0")
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            coordinator_bind_address=bind,
            initialization_timeout=_START_TIMEOUT_S,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=max(heartbeat_timeout, _SHUTDOWN_TIMEOUT_S),
        )
    except ValueError as error:
        _refuse(place, error)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ClusterError(f"{failure}: {reason}") from error
    finally:
        notice.dismiss()
    # All processes are connected now.
    keep_connections(heartbeat_timeout)
    check_equal(surroundings(), remedy="install and set the same on all machines")


def _refuse(place: Place, error: ValueError) -> NoReturn:
    missing = [
        f"{option} (or {name})"
        for option, name, value in (
            ("--coordinator HOST:PORT", ADDRESS, place.coordinator),
            ("--process-id", INDEX, place.index),
            ("--processes", COUNT, place.count),
        )
        if value is None
    ]
    if not missing:
        raise SettingError(f"--distributed cannot start: {error}") from error
    raise SettingError(
        f"--distributed finds no cluster (SLURM, Open MPI, Cloud TPU or Kubernetes): give {', '.join(missing)}"
    ) from error


def _check_devices(text: str) -> None:
    """Refuses a list of this process's GPUs that JAX would misread silently, or that would make it fail."""
    ids = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() for word in ids) or len({int(word) for word in ids}) < len(ids):
        raise SettingError(f"{DEVICES} must be whole numbers with commas between, each once, got {text!r}")


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    # int() also accepts 1_0 as 10, and the digits of every script.
    if not (text.isascii() and text.removeprefix("-").isdecimal()) or len(text) > 18:
        raise SettingError(f"{name} must be a whole number, got {text!r}")
    return int(text)
