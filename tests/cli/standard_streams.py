"""The command in a process of its own."""

import os
import sys

COMMAND = [sys.executable, "-m", "gradcomp_jax.cli"]


def environment(**more: str) -> dict[str, str]:
    """The tests' own, without their number of simulated devices."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | more


def hearing(command: list[str]) -> list[str]:
    """Returns a command that hears SIGINT, which a shell has its background processes, and all that they start, ignore."""
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", heard, *command]
