"""docs/commands.md: its example runs as written, and it names every option that there is."""

import pathlib
import re
import shlex
import sys

import jax
import pytest

pytest.importorskip("typer")

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


def example(marker: str) -> str:
    found = re.search(rf"<!-- example: {re.escape(marker)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found, marker
    return found.group(1)


@pytest.fixture
def gradcomp(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from gradcomp_jax.cli.app import app

    jax.devices()  # The tests' eight: a command must not be the first to look for devices.
    (tmp_path / "my_task.py").write_text(example("my_task.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)

    def call(line: str):
        program, *words = shlex.split(line)
        assert program == "gradcomp"
        return CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "200"})

    return call


COMPARE, TRAIN, PLAN = example("commands").splitlines()


def test_the_plan_of_the_example(gradcomp) -> None:
    result = gradcomp(PLAN)
    assert result.exit_code == 0, result.output
    assert "my_task:make: 16,640 values, 5 ms a step; 4 workers, 1 Gbit/s" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", [COMPARE, TRAIN])
def test_the_example_trains(gradcomp, line: str) -> None:
    result = gradcomp(line)
    assert result.exit_code == 0, result.output
    assert "my_task:make: 4 workers x 32 examples, 3 epochs, SGD 0.01" in result.stdout
    assert "evaluation loss" in result.stdout and "bytes/step" in result.stdout


def test_the_audit_of_the_example(gradcomp, tmp_path, monkeypatch) -> None:
    """All but the source line, which programs of tests do not have."""
    (tmp_path / "my_step.py").write_text(example("my_step.py"))
    monkeypatch.delitem(sys.modules, "my_step", raising=False)
    environment, line = example("audit").splitlines()
    assert environment.endswith(f"device_count={jax.device_count()}")
    result = gradcomp(line)
    assert result.exit_code == 3
    shown = re.search(r"<!-- output: audit -->\n```text\n(.*?)```", PAGE, re.DOTALL).group(1).splitlines()
    header, rule, row, *rest = result.stdout.splitlines()
    assert header.split() == shown[0].split() and set(rule) == {"\u2500"}
    assert row.split()[:-1] == shown[2].split()[:-1] and rest == shown[3:]
    (made,) = (i for i, text in enumerate(example("my_step.py").splitlines(), 1) if "pmean" in text)
    assert shown[2].endswith(f" my_step.py:{made}")


@pytest.mark.parametrize("command", ["compare", "train", "methods", "plan", "audit", "island"])
def test_every_option_is_there(command: str) -> None:
    from typer.main import get_command

    from gradcomp_jax.cli.app import app

    group = get_command(app)
    options = {name for option in group.get_command(None, command).params for name in option.opts}
    told = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    assert {name for name in options if name.startswith("--")} - {"--help"} <= told


def test_no_option_is_there_that_is_not() -> None:
    from typer.main import get_command

    from gradcomp_jax.cli.app import app

    group = get_command(app)
    known = {
        name
        for command in group.list_commands(None)
        for p in group.get_command(None, command).params
        for name in p.opts
    }
    assert set(re.findall(r"`(--[a-z][a-z-]*)", PAGE)) <= known | {"--help"}
