"""The command and its parts, each of which is imported when it is called: a plan does not wait for all that trains."""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gradcomp_jax._errors import UnknownNameError, known_name
from gradcomp_jax.cli import help_of
from gradcomp_jax.cli.ranges import unparsed

_COMMANDS = ("compare", "train", "methods", "plan", "audit", "island")
"""Modules of this folder; ``NAME_command`` in each is the command."""


class _OnDemand(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"gradcomp_jax.cli.{cmd_name}")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(getattr(module, f"{cmd_name}_command"))
        made: Any = typer.main.get_command(alone)
        made.format_help = lambda ctx, formatter: formatter.write(help_of(cmd_name))
        return made

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_of(""))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-"):
            try:
                known_name("command", args[0], _COMMANDS)
            except UnknownNameError as error:
                typer.echo(f"gradcomp: {error}", err=True)
                raise typer.Exit(2) from error
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            typer.echo(f"gradcomp: {unparsed(error)}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_OnDemand,
    help="Gradient compression for JAX: train with it, and see what it saves.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from gradcomp_jax.experiments.machine import versions

        typer.echo(f"gradcomp {versions()['gradcomp-jax']}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version
