"""``gradcomp methods``: what every method sends and keeps."""

from typing import Annotated

import typer
from rich.console import Console

from gradcomp_jax._errors import SettingError
from gradcomp_jax.cli import report
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.methods import markdown_table


def methods_command(
    workers: Annotated[int, typer.Option(help="Workers that the bits are counted for.")] = 8,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, as it stands in the README.")
    ] = False,
) -> None:
    """List every method: what it sends and keeps, read from its program for one large matrix."""
    with user_errors():
        if workers < 2:
            raise SettingError(f"workers must be at least 2, got {workers}: one worker sends nothing")
        if as_markdown:
            typer.echo(markdown_table(workers=workers), nl=False)
        else:
            Console().print(report.method_table(workers))
