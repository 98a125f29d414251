"""Turns what the user got wrong into one sentence on stderr and an exit code, for every command."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import jax
import typer

from gradcomp_jax._errors import ExperimentError
from gradcomp_jax._process import Stopped
from gradcomp_jax.distributed import FAILED, ClusterError


@contextlib.contextmanager
def mistakes(say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hands an error of the user, as one sentence, to ``say``, by default to stderr, and exits with code 2."""
    try:
        yield
    except ExperimentError as error:
        # Whose error it is, where there are several processes.
        process = f"process {jax.process_index()}: " if jax.distributed.is_initialized() else ""
        (say or functools.partial(typer.echo, err=True))(f"gradcomp: {process}{error}")
        raise typer.Exit(2) from error


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Prints an error of the user as one sentence on stderr and exits with code 2; a signal or a lost process has its own."""
    try:
        with mistakes():
            yield
    except Stopped as stop:
        raise typer.Exit(stop.code) from stop
    except ClusterError as error:
        typer.echo(f"gradcomp: {error}", err=True)
        # No orderly exit: it crashes in a coordination service that is half started.
        os._exit(FAILED)
