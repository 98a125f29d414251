"""Turns what the user got wrong into one sentence on stderr and an exit code, for every command."""

import contextlib
import os
from collections.abc import Iterator

import jax
import typer

from gradcomp_jax._errors import ExperimentError
from gradcomp_jax.distributed import FAILED, ClusterError


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Prints an error of the user as one sentence on stderr and exits with code 2."""
    try:
        yield
    except ExperimentError as error:
        typer.echo(f"gradcomp: {_process()}{error}", err=True)
        raise typer.Exit(2) from error
    except ClusterError as error:
        typer.echo(f"gradcomp: {error}", err=True)
        # No orderly exit: it crashes in a coordination service that is half started.
        os._exit(FAILED)


def _process() -> str:
    """Whose error it is, where there are several processes."""
    if not jax.distributed.is_initialized():
        return ""
    return f"process {jax.process_index()}: "
