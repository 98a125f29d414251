"""Writes what ``gradcomp --help`` prints into the package, after a change of an option.

    python benchmarks/help_pages.py

The pages are kept as they are, so that a process that is asked for nothing else need not import JAX.
"""

import json
import pathlib
import sys
import textwrap
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from typer.main import get_command

from gradcomp_jax import cli
from gradcomp_jax._files import write_whole
from gradcomp_jax.cli.app import app

_WIDTH = 80
_EXAMPLES = {
    "": (
        "gradcomp compare --methods dense-bf16,dgc --quick",
        "gradcomp plan --model resnet50 --step-time 180ms --workers 64 --link 10Gbit",
    ),
    "compare": ("gradcomp compare --methods dense-bf16,dgc,terngrad --quick", "gradcomp compare --task language-model"),
    "train": ("gradcomp train --method dgc --checkpoint run",),
    "methods": ("gradcomp methods",),
    "plan": (
        "gradcomp plan --model resnet50 --step-time 180ms --workers 64 --link 10Gbit",
        "gradcomp plan --model llama-8b --optimizer adamw --cluster h100x8-100G",
    ),
    "audit": (
        "gradcomp audit step.hlo --mesh data=8 --on data --at-most 12MB",
        "gradcomp audit my_step:compiled --expect-dtype bf16 --on data",
    ),
    "island": (
        "gradcomp island run --name london",
        "gradcomp island run --follow",
        "gradcomp island run --picture run.png --metrics gradcomp-islands/london",
    ),
}


def page(name: str, command: Any, commands: dict[str, Any] | None = None) -> str:
    """Returns the help of a command: what it does, an example, then its options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = ["COMMAND"] if commands else [p.metavar for p in arguments]
    usage = " ".join(filter(None, ("gradcomp", name, *words, "[OPTIONS]")))
    parts = [f"Usage: {usage}", *_paragraphs(command.help or "")]
    parts.append("\n".join(["For example:", *(f"  {line}" for line in _EXAMPLES[name])]))
    if commands:
        lines = [_entry(one, (made.help or "").strip().partition("\n")[0]) for one, made in commands.items()]
        parts.append("\n".join(["Commands:", *lines, "", "gradcomp COMMAND --help says more."]))
    if arguments:
        parts.append("\n".join(["Arguments:", *(_entry(p.metavar, p.help) for p in arguments)]))
    options = [_option(p) for p in command.params if p.param_type_name == "option"]
    parts.append("\n".join(["Options:", *options, _entry("-h, --help", "Show this and exit.")]))
    return "\n\n".join(parts) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [textwrap.fill(" ".join(part.split()), _WIDTH) for part in text.strip().split("\n\n") if part.strip()]


def _option(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
    known = option.show_default if isinstance(option.show_default, str) else None
    if known is None and not option.is_flag and option.default is not None:
        known = str(option.default)
    default = f" [default: {known}]" if known else ""
    return _entry(", ".join(option.opts) + value, f"{option.help or ''}{default}")


def _entry(name: str, text: str) -> str:
    indent = " " * 6
    lines = textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {name}\n{lines}"


def pages() -> dict[str, str]:
    """Returns all pages, by the name of the command."""
    group: Any = get_command(app)
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    return {"": page("", group, commands), **{name: page(name, one) for name, one in commands.items()}}


if __name__ == "__main__":
    write_whole(cli.PAGES, json.dumps(pages(), indent=1) + "\n")
