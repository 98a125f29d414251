"""Simulated CPU devices, asked for before JAX looks at the machine."""

import os

import jax

_FLAG = "--xla_force_host_platform_device_count"


def simulate(workers: int) -> None:
    """Makes this process's CPU appear as ``workers`` devices.

    JAX reads the flag when it first looks for devices, not when it is imported. A process that has
    looked already keeps the devices it has; a mesh that needs more then says so.
    """
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_FLAG}={workers}"])
    jax.config.update("jax_platforms", "cpu")
