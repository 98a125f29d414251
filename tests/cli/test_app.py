"""The commands: help, every user error with its exit code, and what a run leaves behind."""

import json

import pytest

from gradcomp_jax.experiments.recipes import ABLATIONS, ALL, RECIPES
from gradcomp_jax.experiments.tasks import TASKS
from gradcomp_jax.methods import METHODS, markdown_table
from gradcomp_jax.methods.registry import command_name

TINY = ("--workers", "2", "--epochs", "2", "--batch", "64")


def test_help_names_the_commands(gradcomp):
    result = gradcomp("--help")
    assert result.exit_code == 0
    assert "compare" in result.stdout
    assert "train" in result.stdout


@pytest.mark.parametrize("command", ["compare", "train"])
def test_help_names_every_method_and_data_set(gradcomp, command):
    result = gradcomp(command, "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.replace("│", " ").split())
    for name in (*RECIPES, *TASKS):
        assert name in text


def test_version(gradcomp):
    result = gradcomp("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("gradcomp ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "--methods", "dgc,ternegrad"), "did you mean 'terngrad'"),
        (("compare", "--methods", ","), "methods must not be empty"),
        (("compare", "--dataset", "digts"), "did you mean 'digits'"),
        (("compare", "--seeds", "0"), "seeds must be at least 1, got 0"),
        (("compare", "--workers", "0"), "workers must be at least 1, got 0"),
        (("compare", "--workers", "7"), "use 63 or 70"),
        (("compare", "--batch", "65"), "a batch of 65 does not divide among 8 workers"),
        (("compare", "--batch", "8000"), "larger than the training set"),
        (("compare", "--density", "0"), "density must be in (0, 1], got 0.0"),
        (("compare", "--density", "1.5"), "density must be in (0, 1], got 1.5"),
        (("compare", "--epochs", "0"), "epochs must be at least 1, got 0"),
        (("compare", "--momentum", "1"), "momentum must be in [0, 1), got 1.0"),
        (("compare", "--learning-rate", "-1"), "learning_rate must be positive, got -1.0"),
        (("compare", "--data-dir", "."), "drop data_dir"),
        (("compare", "--dataset", "fashion-mnist", "--data-dir", "."), "apt-get install -y"),
        (("compare", "--quick", "--epochs", "0"), "epochs must be at least 1, got 0"),
        (("compare", "--out", "file"), "cannot write to file"),
        (("train", "--method", "dcg"), "did you mean 'dgc'"),
        (("train", "--method", "all"), "unknown method 'all'"),
        (("train", "--dataset", "mnist"), "did you mean 'fashion-mnist'"),
        (("train", "--density", "-0.1"), "density must be in (0, 1], got -0.1"),
        (("train", "--workers", "64", "--batch", "64"), "64 workers need 64 devices"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(gradcomp, tmp_path, words, message):
    (tmp_path / "file").write_text("not a folder")
    result = gradcomp(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("gradcomp: ")
    assert message in line


@pytest.mark.parametrize("words", [("compare", "--seed", "x"), ("compar",), ("train", "--nothing")])
def test_words_that_do_not_parse_end_with_exit_code_2(gradcomp, words):
    assert gradcomp(*words).exit_code == 2


@pytest.fixture
def compared(gradcomp, tmp_path):
    """A small comparison and the folder it wrote to."""
    result = gradcomp(
        *("compare", "--methods", "dense-bf16,dgc", "--seeds", "2", "--density", "0.05", *TINY),
        *("--out", "results", "--markdown", "pages/digits.md"),
    )
    assert result.exit_code == 0, result.stderr
    return result, tmp_path


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
            assert len(run["accuracy"]) == 2
        assert 0 < method["accuracy_mean"] < 1
        sent = method["wire"]["sent"]
        assert method["ratio_f32"] == fields["baseline_bytes"]["dense"] / sent
        assert method["ratio_bf16"] == fields["baseline_bytes"]["dense-bf16"] / sent
        # The table shows the figures of the file, and so does the page.
        row = next(r for r in result.stdout.splitlines() if r.split()[:1] == [method["method"]])
        assert f"{100 * method['accuracy_mean']:.2f}" in row
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
    assert _method_names("ablations") == list(ABLATIONS)
    assert _method_names("topk_sgd,topk-sgd,dense_bf16") == ["topk-sgd", "dense-bf16"]
    assert _method_names(" dgc, ablations,terngrad ") == list(dict.fromkeys(("dgc", *ABLATIONS, "terngrad")))


@pytest.mark.parametrize("spelled", ["topk_sgd", "topk-sgd"])
def test_a_method_has_one_name_however_it_is_spelled(gradcomp, tmp_path, spelled: str):
    line = ("train", "--method", spelled, "--workers", "2", "--batch", "718", "--epochs", "1")
    assert gradcomp(*line).exit_code == 0
    assert json.loads((tmp_path / "gradcomp-results/train-topk-sgd-digits.json").read_text())
    found = gradcomp("plan", "--params", "5M", "--methods", spelled)
    assert found.exit_code == 0 and "topk-sgd" in found.stdout and "topk_sgd" not in found.stdout


def test_train_goes_on_from_its_checkpoint(gradcomp, tmp_path):
    base = ("train", "--method", "dense-bf16", "--workers", "2", "--batch", "128", "--seed", "3")
    assert gradcomp(*base, "--epochs", "1", "--checkpoint", "saved").exit_code == 0
    assert gradcomp(*base, "--epochs", "2", "--checkpoint", "saved").exit_code == 0
    path = tmp_path / "gradcomp-results/train-dense-bf16-digits.json"
    fields = json.loads(path.read_text())
    assert fields["seeds"] == [3]
    ((run,),) = (method["runs"] for method in fields["methods"])
    assert len(run["loss"]) == 2 * (1438 // 128)
    assert len(run["accuracy"]) == 2
    done = gradcomp(*base, "--epochs", "2", "--checkpoint", "saved")
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert "ask for more than 2" in line


def test_methods_lists_every_method(gradcomp):
    result = gradcomp("methods")
    assert result.exit_code == 0
    assert all(command_name(name) in result.stdout for name in METHODS)
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_methods_as_markdown_is_the_table(gradcomp):
    result = gradcomp("methods", "--workers", "4", "--markdown")
    assert result.stdout == markdown_table(workers=4)


def test_methods_of_one_worker_are_refused(gradcomp):
    result = gradcomp("methods", "--workers", "1")
    assert result.exit_code == 2
    assert "workers must be at least 2, got 1" in result.stderr


def test_a_command_that_is_close_to_one_is_suggested(gradcomp):
    result = gradcomp("plann")
    assert result.exit_code == 2
    assert "No such command 'plann'" in result.stderr
    assert "'plan'" in result.stderr
