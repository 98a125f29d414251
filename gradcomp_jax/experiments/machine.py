"""What a result was measured on: a figure without it says nothing."""

import os
import pathlib
import platform

import jax

from gradcomp_jax.distributed.surroundings import versions as versions


def machine() -> dict[str, str | int]:
    """Returns the processor, cores, memory (GiB), system and accelerator of this machine, and how many processes ran."""
    devices = jax.devices()
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "processes": jax.process_count(),
    }


def _processor() -> str:
    # The portable call is empty on most Linux systems.
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> int:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return 0
