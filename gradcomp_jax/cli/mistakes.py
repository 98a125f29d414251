"""A mistake of the user is one sentence on stderr and an exit code, whatever the command."""

import contextlib
import os
from collections.abc import Iterator

import jax
import typer

from gradcomp_jax._errors import ExperimentError
from gradcomp_jax.cli import cluster
from gradcomp_jax.cli.witness import FAILED


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a mistake of the user into one sentence on stderr and exit code 2."""
    try:
        yield
    except ExperimentError as error:
        typer.echo(f"gradcomp: {_process()}{error}", err=True)
        raise typer.Exit(2) from error
    except cluster.ClusterError as error:
        typer.echo(f"gradcomp: {error}", err=True)
        # No orderly exit: it crashes in a coordination service that is half started.
        os._exit(FAILED)


def _process() -> str:
    """Whose error it is, where there are several processes."""
    if not jax.distributed.is_initialized():
        return ""
    return f"process {jax.process_index()}: "
