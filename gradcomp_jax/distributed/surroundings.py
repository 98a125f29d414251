"""What surrounds a program and decides what it computes: versions, source, flags."""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
from collections.abc import Mapping

import jax

_PACKAGES = ("gradcomp-jax", "jax", "jaxlib", "optax", "flax", "numpy")

_FLAGS = (
    "jax_enable_x64",
    "jax_default_dtype_bits",
    "jax_numpy_dtype_promotion",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_use_shardy_partitioner",
    "jax_platforms",
    "jax_cpu_collectives_implementation",
)

_HARMLESS = re.compile(
    r"--(xla_force_host_platform_device_count|xla_dump\w*|\w*(timeout|num_threads|parallelism)\w*)(=|$)"
)
"""XLA's flags that may differ: how many devices a process has, what it dumps, how long it waits, how many threads it uses."""


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def surroundings(environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Returns what must be equal in all processes before they make a program.

    These are versions, a digest of this package's source, JAX's numerical settings, and XLA's flags that are not about a single
    machine.
    """
    found: dict[str, str | None] = {f"the version of {name}": version for name, version in versions().items()}
    found["the version of python"] = ".".join(platform.python_version_tuple()[:2])
    found["the source of gradcomp_jax"] = _source()
    found |= {flag: None if (value := getattr(jax.config, flag, None)) is None else str(value) for flag in _FLAGS}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        words = environment.get(name, "").split()
        found[name] = " ".join(sorted(word for word in words if not _HARMLESS.match(word)))
    return found


@functools.cache
def _source() -> str:
    folder = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
