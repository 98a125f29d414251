"""Turns what the user got wrong into one sentence on stderr and an exit code, for every command."""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax
import typer

from gradcomp_jax._errors import ExperimentError
from gradcomp_jax._process import Stopped
from gradcomp_jax.distributed import FAILED, ClusterError


def _to_stderr(sentence: str) -> None:
    typer.echo(sentence, err=True)


@contextlib.contextmanager
def mistakes(say: Callable[[str], None] = _to_stderr) -> Iterator[None]:
    """Hands an error of the user, as one sentence, to ``say``, and exits with code 2."""
    try:
        yield
    except ExperimentError as error:
        say(f"gradcomp: {_process()}{error}")
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


def _process() -> str:
    """Says whose error it is, where there are several processes."""
    if not jax.distributed.is_initialized():
        return ""
    return f"process {jax.process_index()}: "
