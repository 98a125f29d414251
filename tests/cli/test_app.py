"""The commands: help, every user error with its exit code, and what a run leaves behind."""

import dataclasses
import functools
import importlib
import inspect
import json
from typing import Any, get_args

import pytest

from gradcomp_jax._errors import SettingError
from gradcomp_jax.cli import runs
from gradcomp_jax.cli.method_table import markdown_table
from gradcomp_jax.cli.options import Training
from gradcomp_jax.experiments.recipes import ALL, RECIPES, REPLICAS
from gradcomp_jax.experiments.settings import split_batch
from gradcomp_jax.experiments.tasks import TASKS
from gradcomp_jax.methods import METHODS
from gradcomp_jax.methods.registry import command_name

TINY = ("--workers", "2", "--epochs", "2", "--batch", "64")


def test_help_names_the_commands(gradcomp):
    result = gradcomp("--help")
    assert result.exit_code == 0
    assert "compare" in result.stdout
    assert "train" in result.stdout


@pytest.mark.parametrize("command", ["compare", "train"])
def test_help_names_every_data_set_and_says_where_the_methods_are(gradcomp, command):
    result = gradcomp(command, "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert all(name in text for name in TASKS) and "gradcomp methods lists them" in text
    # An example comes before the options, and nobody reads all names to find it.
    assert text.index(f"gradcomp {command} --method") < text.index("Options:")
    assert sum(name in text.replace(",", " ").split() for name in RECIPES) < 10
    assert max(map(len, result.stdout.splitlines())) <= 80
    listed = gradcomp("methods").stdout.replace(",", " ").split()
    assert set(RECIPES) <= set(listed)


@pytest.mark.parametrize("dataset", TASKS)
def test_a_task_starts_with_its_own_number_of_workers(dataset):
    own = TASKS[dataset].settings
    assert runs.workers(Training(task=dataset)) == own.workers
    assert split_batch(own.batch, runs.workers(Training(task=dataset))) == own.batch_per_worker
    assert runs.workers(Training(task=dataset, workers=2)) == 2
    assert runs.workers(Training(source="module:function")) == 8


def test_version(gradcomp):
    result = gradcomp("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("gradcomp ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "--methods", "dgc,ternegrad"), "did you mean 'terngrad'"),
        (("compare", "--methods", ","), "methods must not be empty"),
        (("compare", "--task", "digts"), "unknown task 'digts'; did you mean 'digits'"),
        (("compare", "--dataset", "digts"), "unknown task 'digts'; did you mean 'digits'"),
        (("compare", "--methods", "dense-bf16,sparse-adamw"), "sparse-adamw: AdamW is a part of it"),
        (("train", "--method", "sparse-adamw"), "take one that trains with AdamW, such as --task language-model"),
        (("compare", "--task", "language-model", "--data-dir", "empty"), "empty has 0 characters of it"),
        (("compare", "--seeds", "0"), "--seeds must be a whole number from 1 to 1,000, got 0"),
        (("compare", "--workers", "0"), "--workers must be a whole number from 1 to 65,536, got 0"),
        (("train", "--workers", "100000"), "--workers must be a whole number from 1 to 65,536, got 100000"),
        (("train", "--workers", "2048", "--batch", "2048"), "simulated workers must be a whole number from 1 to 1,024"),
        (("train", "--epochs", "1e23"), "--epochs must be a whole number from 1 to 1,000,000"),
        (("compare", "--epochs", "9" * 23), "--epochs must be a whole number from 1 to 1,000,000, got 999"),
        (("train", "--batch", "0"), "--batch must be a whole number from 1 to 16,777,216, got 0"),
        (("train", "--delay", "100000000"), "--delay must be a whole number from 0 to 1,024, got 100000000"),
        (("compare", "--every", str(2**31)), "--every must be a whole number from 1 to 1,000,000, got 2147483648"),
        (("train", "--seed", str(2**64)), "--seed must be a whole number from 0 to 4,294,967,295, got"),
        (
            ("train", "--heartbeat-timeout", "100000000000"),
            "--heartbeat-timeout must be a whole number from 1 to 86,400",
        ),
        (("train", "--step-timeout", "inf"), "--step-timeout must be in [1, 604,800], got inf"),
        (("plan", "--params", "1e13"), "--params must be at least 1 and at most 1,000,000,000,000, got '1e13'"),
        (("plan", "--params", "5M", "--overlap", "nan"), "--overlap must be in [0, 1], got nan"),
        (("plan", "--params", "5M", "--workers", "9" * 12), "--workers must be a whole number from 1 to 1,000,000"),
        (("plan", "--params", "5M", "--step-time", "1e30s"), "--step-time must be at least 0 and at most 604,800 s"),
        (("methods", "--workers", "1"), "--workers must be a whole number from 2 to 65,536, got 1"),
        (("compare", "--workers", "7"), "use 63 or 70"),
        (("compare", "--batch", "65"), "a batch of 65 does not divide among 8 workers"),
        (("compare", "--batch", "8000"), "larger than the training set"),
        (("compare", "--density", "0"), "--density must be in (0, 1], got 0.0"),
        (("compare", "--density", "1.5"), "--density must be in (0, 1], got 1.5"),
        (("compare", "--epochs", "0"), "--epochs must be a whole number from 1 to 1,000,000, got 0"),
        (("compare", "--momentum", "1"), "--momentum must be in [0, 1), got 1.0"),
        (("compare", "--learning-rate", "-1"), "--learning-rate must be in (0, 1,000,000], got -1.0"),
        (("train", "--learning-rate", "inf"), "--learning-rate must be in (0, 1,000,000], got inf"),
        (("train", "--density", "nan"), "--density must be in (0, 1], got nan"),
        (("compare", "--data-dir", "."), "drop data_dir"),
        (("compare", "--quick", "--epochs", "x"), "--epochs must be a whole number from 1 to 1,000,000"),
        (("compare", "--out", "file"), "--out must name a folder, and file is none: name another"),
        (("compare", "--out", "file/in"), "cannot write to file/in: Not a directory: name another with --out"),
        (("compare", "--markdown", "."), "--markdown must name a file, and . is a folder: name a file in it"),
        (("train", "--checkpoint", "file"), "--checkpoint must name a folder, and file is none: name another"),
        (("compare", "--checkpoint", "/dev/null"), "--checkpoint must name a folder, and /dev/null is none"),
        (("train", "--checkpoint", ""), "--checkpoint must name a folder of its own"),
        (("train", "--method", "dcg"), "did you mean 'dgc'"),
        (("train", "--method", "all"), "unknown method 'all'"),
        (("train", "--dataset", "langage-model"), "did you mean 'language-model'"),
        (("train", "--density", "-0.1"), "--density must be in (0, 1], got -0.1"),
        (("train", "--workers", "64", "--batch", "64"), "64 workers need 64 devices"),
        (("train", "--one-device", "--real-devices"), "--real-devices on several: drop one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(gradcomp, tmp_path, words, message):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "empty").mkdir()
    result = gradcomp(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("gradcomp: ")
    assert message in line


@pytest.mark.parametrize(
    "words", [("compare", "--seed", "x"), ("compar",), ("train", "--nothing"), ("plan", "--workers")]
)
def test_words_that_do_not_parse_end_with_exit_code_2(gradcomp, words):
    assert gradcomp(*words).exit_code == 2


@pytest.mark.parametrize("command", ["compare", "train", "plan", "methods", "island"])
def test_every_number_has_a_range_and_the_help_says_it(command):
    """A new option without one is refused here, and not by a user."""
    typer = pytest.importorskip("typer")
    from gradcomp_jax.cli.app import app

    parameters = inspect.signature(typer.main.get_command(app).get_command(None, command).callback).parameters
    given = {name: get_args(p.annotation) for name, p in parameters.items()}
    numbers = [facts[1] for facts in given.values() if facts and {int, float} & _kinds(facts[0])]
    assert numbers
    for option in numbers:
        with pytest.raises(typer.BadParameter, match="must be") as refused:
            option.parser("nan")
        assert str(refused.value).removeprefix("must be ").removesuffix(", got nan") in option.help


def _kinds(annotation: Any) -> set[Any]:
    """A type, or those of a union."""
    return set(get_args(annotation)) or {annotation}


@pytest.mark.parametrize("task", ["digits", "language-model"])
@pytest.mark.parametrize("option", ["--task", "--dataset"])
def test_a_task_has_its_own_methods_and_number_of_seeds(gradcomp, monkeypatch, option: str, task: str) -> None:
    seen = []

    def record(problem, names, *, seeds, **how):
        seen.append((problem.name, names, len(seeds)))
        raise SettingError("seen")

    monkeypatch.setattr(importlib.import_module("gradcomp_jax.cli.compare"), "compare", record)
    for words in ((), ("--methods", "dense", "--seeds", "3")):
        assert gradcomp("compare", option, task, *words).stderr.splitlines()[-1] == "gradcomp: seen"
    assert seen == [(task, list(TASKS[task].methods), TASKS[task].seeds), (task, ["dense"], 3)]


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax's schedules count in int32
def test_the_language_model_shows_dense_int4_and_the_sparse_recipe(gradcomp, monkeypatch, tmp_path) -> None:
    one = TASKS["language-model"]
    short = functools.partial(
        one.problem.func, *one.problem.args, **one.problem.keywords | {"steps": 40, "judged": 4096}
    )
    monkeypatch.setitem(TASKS, "language-model", dataclasses.replace(one, problem=short))
    result = gradcomp("compare", "--task", "language-model", "--epochs", "2")
    assert result.exit_code == 0, result.stderr
    fields = json.loads((tmp_path / "gradcomp-results/compare-language-model.json").read_text())
    fewer = {method["method"]: method["ratio_bf16"] for method in fields["methods"]}
    assert list(fewer) == ["dense-bf16", "block-quantized-4-bit", "sparse-adamw"]
    assert 3 < fewer["block-quantized-4-bit"] < 4 and 30 < fewer["sparse-adamw"] < 60
    for method in fields["methods"]:
        # A guess among all characters is worth seven bits.
        assert 2 < method["evaluation_mean"] < 5.5
    assert "8 workers x 1 example, 2 epochs, AdamW 0.006 falling to 0" in result.stdout
    assert "bits/character" in result.stdout and "docs/results/protocol.md" in result.stdout


@pytest.fixture
def compared(gradcomp, tmp_path):
    """A small comparison and the folder it wrote to."""
    result = gradcomp(
        *("compare", "--methods", "dense-bf16,dgc", "--seeds", "2", "--density", "0.05", *TINY),
        *("--out", "results", "--markdown", "pages/digits.md"),
    )
    assert result.exit_code == 0, result.stderr
    return result, tmp_path


@pytest.mark.slow
def test_compare_writes_table_picture_and_figures(compared):
    result, folder = compared
    fields = json.loads((folder / "results/compare-digits.json").read_text())
    assert fields["dataset"] == "digits"
    assert fields["seeds"] == [0, 1]
    assert fields["settings"]["workers"] == 2
    assert fields["settings"]["batch_per_worker"] == 32
    assert fields["settings"]["density"] == 0.05
    assert [method["method"] for method in fields["methods"]] == ["dense-bf16", "dgc"]
    steps = 2 * (1438 // 64)
    for method in fields["methods"]:
        for run in method["runs"]:
            assert len(run["loss"]) == steps
            assert len(run["evaluation"]) == 2
        assert 0 < method["evaluation_mean"] < 1
        sent = method["wire"]["sent"]
        assert method["ratio_f32"] == fields["baseline_bytes"]["dense"] / sent
        assert method["ratio_bf16"] == fields["baseline_bytes"]["dense-bf16"] / sent
        # The table shows the figures of the file, and so does the page.
        row = next(r for r in result.stdout.splitlines() if r.split()[:1] == [method["method"]])
        assert f"{100 * method['evaluation_mean']:.2f}" in row
        assert f"{sent:,}" in row
        assert f"| {method['method']} |" in (folder / "pages/digits.md").read_text()
    assert "dense" in result.stdout
    assert "not trained" in result.stdout
    for seed in (0, 1):
        assert f"seed {seed}, dgc: " in result.stderr
    picture = (folder / "results/compare-digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    for name in ("results/compare-digits.png", "results/compare-digits.json", "pages/digits.md"):
        assert f"wrote {name}" in result.stdout
    page = (folder / "pages/digits.md").read_text()
    assert fields["command"] in page
    assert fields["machine"]["processor"] in page


def test_groups_of_methods_expand_and_repeat_nothing():
    pytest.importorskip("typer")
    from gradcomp_jax.cli.compare import _method_names

    assert _method_names("all") == list(ALL)
    assert _method_names("replicas") == list(REPLICAS)
    assert _method_names("topk_sgd,topk-sgd,dense_bf16") == ["topk-sgd", "dense-bf16"]
    assert _method_names(" diloco, replicas,terngrad ") == list(dict.fromkeys(("diloco", *REPLICAS, "terngrad")))


@pytest.mark.slow
@pytest.mark.parametrize("spelled", ["topk_sgd", "topk-sgd"])
def test_a_method_has_one_name_however_it_is_spelled(gradcomp, tmp_path, spelled: str):
    line = ("train", "--method", spelled, "--workers", "2", "--batch", "718", "--epochs", "1")
    assert gradcomp(*line).exit_code == 0
    assert json.loads((tmp_path / "gradcomp-results/train-topk-sgd-digits.json").read_text())
    found = gradcomp("plan", "--params", "5M", "--methods", spelled)
    assert found.exit_code == 0 and "topk-sgd" in found.stdout and "topk_sgd" not in found.stdout


@pytest.mark.slow
def test_train_goes_on_from_its_checkpoint(gradcomp, tmp_path):
    base = ("train", "--method", "dense-bf16", "--workers", "2", "--batch", "128", "--seed", "3")
    assert gradcomp(*base, "--epochs", "1", "--checkpoint", "saved").exit_code == 0
    assert gradcomp(*base, "--epochs", "2", "--checkpoint", "saved").exit_code == 0
    path = tmp_path / "gradcomp-results/train-dense-bf16-digits.json"
    fields = json.loads(path.read_text())
    assert fields["seeds"] == [3]
    ((run,),) = (method["runs"] for method in fields["methods"])
    assert len(run["loss"]) == 2 * (1438 // 128)
    assert len(run["evaluation"]) == 2
    # What is complete is read: the same table, and nothing trained.
    before = path.read_bytes()
    done = gradcomp(*base, "--epochs", "2", "--checkpoint", "saved")
    assert done.exit_code == 0 and "bytes/step" in done.stdout
    assert "seed 3, dense-bf16: complete already, its 22 steps are read and not trained again" in done.stderr
    assert "epoch 1" not in done.stderr
    assert path.read_bytes() == before
    fewer = gradcomp(*base, "--epochs", "1", "--checkpoint", "saved")
    assert fewer.exit_code == 2
    assert "ask for as many epochs to see what it gave" in fewer.stderr.splitlines()[-1]


def test_methods_lists_every_method(gradcomp):
    result = gradcomp("methods")
    assert result.exit_code == 0
    assert all(command_name(name) in result.stdout for name in METHODS)
    # A pipe has no width: nothing is left out.
    assert "recursive_doubling" in result.stdout and "1712.01887" in result.stdout


def test_methods_as_markdown_is_the_table(gradcomp):
    result = gradcomp("methods", "--workers", "4", "--markdown")
    assert result.stdout == markdown_table(workers=4)


def test_a_command_that_is_close_to_one_is_suggested(gradcomp):
    for typed, meant in (
        ("plann", "plan"),
        ("trian", "train"),
        ("TRAIN", "train"),
        ("method", "methods"),
    ):
        result = gradcomp(typed)
        assert result.exit_code == 2 and result.stdout == ""
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith(f"gradcomp: unknown command '{typed}'; did you mean '{meant}'?")
    (line,) = gradcomp("zzz").stderr.strip().splitlines()
    assert line.endswith("(known: compare, train, methods, plan, audit, island)") and "did you mean" not in line
