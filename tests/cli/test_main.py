"""The entry point, in a process of its own: its environment, and a missing extra."""

import importlib.util
import os
import subprocess
import sys

import pytest

import gradcomp_jax.cli


def run(*words, code=None, **environment):
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "gradcomp_jax.cli"]
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [*command, *words],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_workers_are_simulated_without_any_environment(tmp_path):
    pytest.importorskip("typer")
    words = ("train", "--method", "dense", "--workers", "3", "--batch", "96", "--epochs", "1")
    result = run(*words, "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "train-dense-digits.json").read_text()
    assert f'"command": "gradcomp {" ".join(words)} --out {tmp_path}"' in text


def test_other_flags_of_xla_are_kept(monkeypatch):
    from gradcomp_jax.cli.runs import simulate

    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=2 --b=2")
    simulate(8)
    assert os.environ["XLA_FLAGS"].split() == [
        "--a=1",
        "--b=2",
        "--xla_force_host_platform_device_count=8",
    ]


@pytest.mark.parametrize("module", ["typer", "rich", "matplotlib", "quantiphy"])
def test_a_missing_extra_is_one_sentence_and_exit_code_2(monkeypatch, capsys, module):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == module else found(name, *more))
    with pytest.raises(SystemExit) as caught:
        gradcomp_jax.cli.main(["methods"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert module in line
    assert "pip install -e '.[cli]' in a checkout" in line


@pytest.mark.slow
def test_a_plan_imports_nothing_that_trains_or_draws():
    # It is asked many times with other figures, and is to answer in less than two seconds.
    pytest.importorskip("typer")
    code = (
        "import atexit, sys\nfrom gradcomp_jax.cli import main\n"
        "unused = ('gradcomp_jax.experiments', 'flax', 'matplotlib', 'orbax')\n"
        "atexit.register(lambda: print('imported:', [name for name in unused if name in sys.modules]))\n"
        "main()"
    )
    result = run("plan", "--model", "resnet50", code=code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "imported: []"


@pytest.mark.slow
def test_missing_scikit_learn_is_one_sentence_and_exit_code_2(tmp_path):
    pytest.importorskip("typer")
    code = (
        "import sys; sys.modules['sklearn'] = None; sys.modules['sklearn.datasets'] = None\n"
        "from gradcomp_jax.cli import main; main()"
    )
    result = run("compare", "--out", str(tmp_path), code=code)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert "pip install -e '.[cli]' in a checkout" in line
