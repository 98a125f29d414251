"""The command line in this process."""

import jax
import pytest


@pytest.fixture
def gradcomp(monkeypatch, tmp_path):
    """Calls ``gradcomp`` in an empty folder; returns exit code, stdout and stderr."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from gradcomp_jax.cli.app import app

    # The tests' eight devices stay: a command that asks for two must not be the first to look for devices.
    jax.devices()
    monkeypatch.chdir(tmp_path)

    def call(*words):
        # Wide enough that no message is broken into lines.
        result = CliRunner().invoke(app, words, prog_name="gradcomp", env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call
