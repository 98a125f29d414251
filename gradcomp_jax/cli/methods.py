"""``gradcomp methods``: what every method sends and keeps."""

from typing import Annotated

import typer
from rich.console import Console

from gradcomp_jax.cli import method_table, ranges
from gradcomp_jax.cli.tables import print_table, tell
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.experiments import recipes


def methods_command(
    workers: Annotated[int, ranges.number(ranges.SENDERS, "Workers that the bits are counted for.")] = 8,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, as it stands in the README.")
    ] = False,
) -> None:
    """List every method: what it sends and keeps of one large matrix, as its exchange describes it."""
    with user_errors():
        if as_markdown:
            typer.echo(method_table.markdown_table(workers=workers), nl=False)
        else:
            console = Console()
            print_table(console, method_table.columns(workers), "--markdown has all")
            tell(console, method_table.NOTE, "dim")
            console.print()
            for group, names in _named().items():
                tell(console, f"{group}: {', '.join(names)}")


def _named() -> dict[str, tuple[str, ...]]:
    """Returns what compare and train take, by the names of groups, each once."""
    groups = {f"--methods {name}": names for name, names in recipes.GROUPS.items()}
    grouped = {name for names in groups.values() for name in names}
    return groups | {"and": tuple(name for name in recipes.RECIPES if name not in grouped)}
