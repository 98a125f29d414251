"""Help is printed before JAX is imported, and is that of the options as they are."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from typer.main import get_command

from benchmarks import help_pages
from gradcomp_jax import _process, cli
from gradcomp_jax.cli.app import app
from tests.cli.standard_streams import environment

NAMES = ["", "compare", "train", "methods", "plan", "audit", "island"]


def test_what_is_kept_is_the_help() -> None:
    """After a change of an option: python benchmarks/help_pages.py."""
    assert json.loads(cli.PAGES.read_text(encoding="utf-8")) == help_pages.pages()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_an_example_then_every_option(gradcomp, name: str) -> None:
    result = gradcomp(*([name] if name else []), "--help")
    assert result.exit_code == 0
    assert result.stdout == help_pages.pages()[name]
    example, options = result.stdout.split("\nOptions:\n")
    assert f"\n  gradcomp {name or 'compare'}" in example
    group = get_command(app)
    command = group.get_command(None, name) if name else group
    for option in command.params:
        if option.param_type_name == "option":
            assert all(f"  {spelled}" in options or f", {spelled}" in options for spelled in option.opts)
            assert " ".join(option.help.split()) in " ".join(options.split())


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["plan", "--help"], ["compare", "-h"]], ids=" ".join)
def test_help_is_printed_without_jax(words: list[str]) -> None:
    code = (
        "import atexit, sys\nsys.argv[0] = 'gradcomp'\n"
        "slow = ('jax', 'numpy', 'optax', 'typer', 'rich')\n"
        "atexit.register(lambda: print([name for name in slow if name in sys.modules]))\n"
        "from gradcomp_jax.cli import main\nmain()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    *page, imported = result.stdout.splitlines()
    assert imported == "[]" and page[0].startswith("Usage: gradcomp ")


@pytest.mark.parametrize(
    "words", [[], ["plan"], ["nothing", "--help"], ["plan", "--all", "--help"], ["--version"]], ids=str
)
def test_what_asks_for_more_than_help_goes_on(monkeypatch, words: list[str]) -> None:
    monkeypatch.setattr(_process, "run", lambda command: pytest.fail("it is answered"))
    cli.answer_if_asked(words)
