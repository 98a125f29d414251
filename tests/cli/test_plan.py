"""``gradcomp plan``."""

import dataclasses
import json
import os
import pathlib
import re

import jax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.experiments.registered import RATES
from gradcomp_jax.methods import METHODS
from gradcomp_jax.methods.registry import command_name
from gradcomp_jax.planning import CLUSTERS, MODELS, PLATFORMS, Calibration, Device, Fit
from gradcomp_jax.planning.calibrate import KINDS
from gradcomp_jax.planning.fitting import Point
from gradcomp_jax.planning.predict import FORMULAS_OFF

pytest.importorskip("quantiphy")

from gradcomp_jax.cli import units

NAMES = sorted(command_name(name) for name in METHODS)
ISSUE = ("--params", "25.6M", "--step-time", "180ms", "--workers", "64", "--per-node", "8", "--link", "10Gbit")
SECONDS = ("--prices", "none")


def rows(text: str) -> list[list[str]]:
    """Cells of the table's lines, the method first."""
    lines = [line.split() for line in text.splitlines()]
    return [
        line for line in lines if line and line[0] in NAMES and any(re.fullmatch(r"[\d.]+x", cell) for cell in line)
    ]


def test_a_table_and_a_verdict(gradcomp) -> None:
    result = gradcomp("plan", "--all", *ISSUE)
    assert result.exit_code == 0, result.stderr
    assert (
        "25.6M parameters: 25,600,000 values, 180 ms a step; 64 workers, 8 to a node, 10 Gbit/s, 50 us" in result.stdout
    )
    assert sorted(row[0] for row in rows(result.stdout)) == NAMES
    assert "Compress: " in result.stdout and re.search(r"; above [\d.]+ [GT]bit/s dense is faster\.", result.stdout)
    assert "modelled" in result.stdout


@pytest.mark.slow
def test_a_fast_link_is_told_not_to(gradcomp) -> None:
    fast = ("--link", "100GB/s", "--latency", "5us", "--memory-rate", "500GB/s")
    result = gradcomp("plan", "--all", "--model", "resnet50", "--step-time", "180ms", "--workers", "8", *fast)
    assert result.exit_code == 0, result.stderr
    assert "Do not compress: dense" in result.stdout


@pytest.mark.slow
def test_the_figures_are_written(gradcomp, tmp_path) -> None:
    result = gradcomp(
        "plan",
        "--all",
        "--model",
        "alexnet",
        "--workers",
        "16",
        "--methods",
        "dgc,ef-sign-sgd",
        "--out",
        "made",
        *SECONDS,
    )
    assert result.exit_code == 0, result.stderr
    kept = json.loads((tmp_path / "made" / "plan.json").read_text())
    assert {p["method"] for p in kept["predictions"]} == {"dense", "dense_bf16", "dgc", "ef_sign_sgd"}
    steps = [p["step"] for p in kept["predictions"]]
    assert steps == sorted(steps)
    assert (tmp_path / "made" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_is_printed_though_it_cannot_be_written(gradcomp, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    result = gradcomp("plan", "--all", *ISSUE, "--methods", "dgc", "--out", "file", *SECONDS)
    assert result.exit_code == 2 and "Compress: dgc" in result.stdout
    assert result.stderr.startswith("gradcomp: cannot write the results that are printed above: ")


def test_parameters_of_your_own(gradcomp, tmp_path, monkeypatch) -> None:
    (tmp_path / "their_model.py").write_text(
        "import jax.numpy as jnp\ndef make():\n    return {'w': jnp.zeros((2048, 512)), 'b': jnp.zeros(7)}\nworse = 'no tree'\n"
    )
    monkeypatch.delitem(__import__("sys").modules, "their_model", raising=False)
    result = gradcomp("plan", "--all", "--from", "their_model:make")
    assert result.exit_code == 0, result.stderr
    assert "1,048,583 values" in result.stdout
    result = gradcomp("plan", "--all", "--from", "their_model:worse")
    assert result.exit_code == 2 and "must be a tree of arrays or of their shapes" in result.stderr
    result = gradcomp("plan", "--all", "--from", "their_model:nothing")
    assert result.exit_code == 2 and "unknown name in their_model 'nothing'" in result.stderr
    # What train takes is good enough: nothing of it is run, and a mistake in it is found.
    (tmp_path / "their_task.py").write_text(
        "import jax.numpy as jnp\ndef make(seed=0):\n    return (lambda p, b: 0.0), {'w': jnp.zeros((99, 99))}, [jnp.ones(8)]\n"
        "def broken():\n    return 1 / 0\n"
    )
    result = gradcomp("plan", "--all", "--from", "their_task:make")
    assert result.exit_code == 0 and "9,801 values" in result.stdout
    result = gradcomp("plan", "--all", "--from", "their_task:broken")
    assert "--from their_task:broken: ZeroDivisionError: division by zero (their_task.py, line 5)" in result.stderr


def test_without_a_calibration_it_says_how_far_off_it_is(gradcomp) -> None:
    result = gradcomp("plan", "--all", "--params", "5M")
    assert f"how far off: {100 * FORMULAS_OFF:.0f}%, the median over measured steps" in result.stdout


def test_a_method_that_trains_otherwise_is_not_ranked_without_a_word(gradcomp) -> None:
    result = gradcomp(
        "plan", "--all", "--params", "5M", "--methods", "random-k,sign-sgd,powersgd", "--link", "1Gbit", *SECONDS
    )
    assert result.exit_code == 0, result.stderr
    marked = {row[0] for row in rows(result.stdout) if "!" in row}
    assert marked == {"random-k", "sign-sgd"}
    assert f"! random-k: {METHODS['random_k'].caution}." in result.stdout
    assert f"Mind how random-k trains: {METHODS['random_k'].caution}." in result.stdout


def test_steps_to_a_loss_are_weighed(gradcomp, tmp_path) -> None:
    """Given prices: a column, the order, and a sentence on what is only faster a step."""
    asked = ("plan", "--all", "--params", "5M", "--methods", "dgc,powersgd,qsgd", "--link", "1Gbit")
    free = gradcomp(*asked, "--prices", "none")
    assert free.exit_code == 0, free.stderr
    assert "Compress: dgc takes " in free.stdout and "price of" not in free.stdout
    assert "prices are off: seconds of a step alone count." in free.stdout
    dgc = {"steps": 6, "reached": False, "task": "enwik8", "seeds": 3, "options": "density 0.01", "page": "prices.md"}
    (tmp_path / "prices.json").write_text(json.dumps({"dgc": dgc, "powersgd": 1.02}))
    weighed = gradcomp(*asked, "--prices", "prices.json")
    assert weighed.exit_code == 0, weighed.stderr
    assert "Compress: powersgd takes " in weighed.stdout and "and 1.02x the steps (given)" in weighed.stdout
    assert re.search("to the same loss; above .* dense is faster", weighed.stdout)
    assert "as fast a step, and not recommended, because it trains worse: it takes " in weighed.stdout
    assert "and more than 6.00x the steps (enwik8, 3 seeds, density 0.01)." in weighed.stdout
    assert rows(weighed.stdout)[0][0] == "powersgd"
    assert "over dense's (prices.md); the order is that of step times price" in weighed.stdout
    (line,) = [line for line in weighed.stdout.splitlines() if line.startswith("qsgd ")]
    assert "no price" in line
    (tmp_path / "prices.json").write_text(json.dumps({"qsgd": 1.1}))
    weighed = gradcomp(*asked, "--prices", "prices.json")
    assert "Compress: qsgd takes " in weighed.stdout
    assert (
        "dgc is " in weighed.stdout
        and "not recommended, because there is no price for it: no run of " in weighed.stdout
    )
    (tmp_path / "prices.json").write_text(json.dumps({"qsgd": 100}))
    weighed = gradcomp(*asked, "--prices", "prices.json")
    assert "Do not compress: dense-bf16 takes " in weighed.stdout
    assert "not recommended, because there is no price for it: no run of " in weighed.stdout
    (tmp_path / "prices.json").write_text(json.dumps({"dgc": dgc | {"steps": 1.5}}))
    weighed = gradcomp(*asked, "--prices", "prices.json", "--link", "20Mbit", "--methods", "dgc")
    assert "Do not compress: dense-bf16 takes " in weighed.stdout
    assert "and more than 1.50x the steps (enwik8, 3 seeds, density 0.01)." in weighed.stdout


def test_what_a_calibration_does_not_know_is_left_out_with_a_sentence(gradcomp, tmp_path) -> None:
    """A link of which only the all-reduce was measured."""
    fit = Fit(alpha=1e-4, beta=1e-9, points=(Point(1024, 1e-4, 1e-4, 1e-4), Point(2**20, 1e-3, 1e-3, 1e-3)))
    Calibration(8, {"all-reduce": fit}, Device()).save(tmp_path / "link.json")
    result = gradcomp("plan", "--all", "--params", "5M", "--calibration", "link.json")
    assert result.exit_code == 0, result.stderr
    assert {row[0] for row in rows(result.stdout)} == {"dense", "powersgd", "dion"}
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("left out: ") and "dgc" in line]
    assert line.endswith("nothing is known of all-to-all: calibrate(mesh, kinds=[..., 'all-to-all'])")
    result = gradcomp("plan", "--all", "--params", "5M", "--calibration", "link.json", "--methods", "dgc")
    assert result.exit_code == 2
    assert "there is no prediction of any method but dense and dense_bf16: " in result.stderr


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_caution_is_what_the_page_says(name: str) -> None:
    """And no method that its experiments give another learning rate, or that lost two points to bfloat16, is without one."""
    docs = pathlib.Path(__file__).parents[2] / "docs"
    method = METHODS[name]
    page = (docs / "methods" / f"{method.make.__name__}.md").read_text(encoding="utf-8")
    use = page.split("\n## When to use it, and when not\n")[1].split("\n## ")[0]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(use.split())).lower()
    assert method.caution.lower() in plain
    found = re.findall(r"^\| ([\w-]+) \| ([\d.]+) ± ", (docs / "results" / "digits-all.md").read_text(), re.MULTILINE)
    accuracy = {method: float(mean) for method, mean in found}
    loses = accuracy.get(command_name(name), 100.0) < accuracy["dense-bf16"] - 2
    assert method.caution or not (loses or name in RATES or method.update != "mean")


@pytest.mark.slow
def test_a_calibration_takes_the_place_of_the_link(gradcomp, tmp_path) -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    found = gc.calibrate(mesh, axis_name="data", sizes=(2**10, 2**14), repeats=1, methods=("dgc",))
    found.save(tmp_path / "link.json")
    result = gradcomp("plan", "--all", "--params", "5M", "--workers", "4", "--calibration", "link.json")
    assert "Arithmetic by the calibration's figures, measured." in result.stdout
    assert result.exit_code == 0, result.stderr
    assert "outer: measured collectives" in result.stdout
    # Of as many nodes: every method is hierarchical, each device with its shard.
    result = gradcomp(
        "plan", "--all", "--params", "5M", "--workers", "8", "--per-node", "2", "--calibration", "link.json"
    )
    assert result.exit_code == 0, result.stderr
    assert all(row[1] == "*" for row in rows(result.stdout))
    result = gradcomp("plan", "--all", "--params", "5M", "--workers", "8", "--calibration", "link.json")
    assert result.exit_code == 2 and "the calibration is of 4 workers, and 8 exchange here" in result.stderr


def test_a_calibrated_plan_says_nothing_of_other_rates(gradcomp, tmp_path) -> None:
    """And of the link only that it is calibrated, whatever --link is by default; nor does it draw curves over rates."""
    points = tuple(Point(size, *(1e-3 + size / 1e8,) * 3) for size in (2**10, 2**25))
    Calibration(8, dict.fromkeys(KINDS, Fit(1e-3, 1e-8, points))).save(tmp_path / "link.json")
    words = ("--params", "5M", "--calibration", "link.json", "--out", "made")
    for methods in ("dgc,terngrad", "stochastic-rounding"):
        result = gradcomp("plan", "--all", *words, "--methods", methods)
        assert result.exit_code == 0, result.stderr
        assert "8 workers, a calibrated link; " in result.stdout
        for wrong in ("Gbit/s", "loses above", "dense is faster", "at any rate"):
            assert wrong not in result.stdout
        assert "compress: cpu's figures, measured; cpu: " in result.stdout
        assert "no picture: a calibration knows one rate and one number of workers" in result.stdout
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["plan.json"]
    assert "speed_up_by_rate" not in json.loads((tmp_path / "made" / "plan.json").read_text())


def test_a_step_that_computes_nothing_has_no_picture(gradcomp, tmp_path) -> None:
    result = gradcomp(
        "plan", "--all", "--params", "5M", "--step-time", "0", "--methods", "dgc", "--out", "made", *SECONDS
    )
    assert result.exit_code == 0, result.stderr
    assert "no picture: a step that computes nothing has no speed-up" in result.stdout
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["plan.json"]


@pytest.fixture
def strange(tmp_path):
    """Files that never end, are not files, or are more than a plan should hold."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nested.json").write_text("[" * 100_000 + "]" * 100_000)
    (tmp_path / "deep.json").write_text('{"dgc": ' + "[" * 300 + "]" * 300 + "}")
    with (tmp_path / "large.json").open("w") as file:
        file.truncate(2**30)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("option", ["--prices", "--calibration"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        *(("/dev/zero", "This is not a file"), ("pipe", "This is not a file"), ("folder", "This is not a file")),
        *(("link", "This is not a file"), ("large.json", "This has more than 16777216 bytes")),
        *(("nested.json", "it is nested too deeply"), ("deep.json", ""), ("bytes", "is no JSON")),
        ("none.json", "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence_at_once(gradcomp, strange, option, path, message) -> None:
    result = gradcomp("plan", "--all", "--params", "5M", option, path)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"gradcomp: cannot read {path}: ") and message in line and len(line) < 400


def test_a_link_to_a_file_of_prices_is_followed(gradcomp, tmp_path) -> None:
    (tmp_path / "prices.json").write_text('{"dgc": 1.5}')
    (tmp_path / "named").symlink_to("prices.json")
    assert gradcomp("plan", "--all", "--params", "5M", "--methods", "dgc", "--prices", "named").exit_code == 0


def flat(text: str) -> str:
    """Words without the ends of lines."""
    return " ".join(text.split())


LLAMA = ("plan", "--model", "llama-8b", "--step-time", "2s", "--cluster", "h100x8-100G")


@pytest.mark.slow
def test_the_verdict_comes_first_and_five_rows_fit_into_eighty_columns(gradcomp) -> None:
    for words in (("plan", *ISSUE), (*LLAMA, "--optimizer", "adamw"), ("plan", "--params", "5M", *SECONDS)):
        result = gradcomp(*words)
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0].startswith(("Compress: ", "Do not compress: ")) and max(map(len, lines)) <= 80
        assert len(rows(result.stdout)) == 5 and any(row[0].startswith("dense") for row in rows(result.stdout))
        assert len(lines) < 35 and f"--all: {len(METHODS)} methods, all columns and notes." in flat(result.stdout)
        everything = gradcomp(*words, "--all")
        assert everything.stdout.splitlines()[0].startswith(lines[0].split(": ")[0])
        assert len(rows(everything.stdout)) == len(METHODS)
        assert [row[0] for row in rows(everything.stdout)][:4] == [row[0] for row in rows(result.stdout)][:4]


def test_dgc_is_not_recommended_for_a_transformer(gradcomp) -> None:
    """Its runs on one did not come as far as dense; on a conv net they did."""
    result = gradcomp(*LLAMA, "--optimizer", "adamw", "--methods", "dgc")
    said = flat(result.stdout)
    assert "Do not compress: " in said and "transformer, adamw" in said
    assert re.search(
        r"dgc is [\d.]+x as fast a step, and not recommended, because it trains worse: .* more than 3.78x", said
    )
    assert "to the same loss" not in said and "gc.adamw" not in said
    conv = flat(
        gradcomp("plan", "--model", "resnet50", "--link", "1Gbit", "--methods", "dgc", "--optimizer", "sgd").stdout
    )
    assert re.search(r"^Compress: dgc takes .* 1\.08x the steps \(cifar10, sgd, 8 workers, .* to the same loss", conv)
    other = flat(
        gradcomp("plan", "--params", "25M", "--link", "1Gbit", "--methods", "dgc", "--task", "transformer").stdout
    )
    assert other.startswith("Do not compress: ")


def test_a_selection_is_recommended_before_adamw_as_it_was_measured(gradcomp) -> None:
    said = flat(gradcomp(*LLAMA, "--optimizer", "adamw", "--link", "1Gbit").stdout)
    assert said.startswith("Compress: topk-two-bits takes ") and " to the same loss" in said
    assert (
        "Write it as gc.adamw(learning_rate, gc.topk_sgd(bits=2, pack_positions=True)): Adam without a first moment"
        in said
    )
    assert "Mind how" not in said
    assert "gc.adamw" not in flat(gradcomp(*LLAMA, "--optimizer", "sgd", "--link", "1Gbit").stdout)


@pytest.mark.slow
def test_without_a_price_of_the_task_nothing_is_said_of_a_loss(gradcomp) -> None:
    asked = ("plan", "--model", "resnet50", "--link", "100Mbit", "--optimizer", "adamw")
    said = flat(gradcomp(*asked).stdout)
    assert said.startswith("Do not compress: ") and "to the same loss" not in said
    assert "no price for it: no run of a conv with adamw and so many workers shows how it trains" in said
    # Of a task that is not known the price is another's, and so it says.
    said = flat(gradcomp("plan", "--params", "25M", "--link", "100Mbit").stdout)
    assert said.startswith("Compress: ") and "to the same loss" not in said and ", by the steps of enwik8" in said
    assert "task not known (--task), any optimizer (--optimizer)" in said


@pytest.mark.slow
def test_the_verdict_says_its_overlap(gradcomp, tmp_path) -> None:
    """Without one asked for both are told: no overlap, and two thirds."""
    asked = ("plan", "--model", "resnet50", "--step-time", "180ms", "--workers", "64", "--per-node", "8")
    both = flat(gradcomp(*asked, "--out", "made").stdout)
    assert "Overlap: that is with 0, the exchange after the backward pass. With 2/3, beside it: " in both
    kept = json.loads((tmp_path / "made" / "plan.json").read_text())["overlapped"]
    given = gradcomp(*asked, "--overlap", str(2 / 3))
    assert "Overlap: that is with 0.666667 of the step beside the exchange." in flat(given.stdout)
    assert given.stdout.startswith("Compress: ") == kept["compress"]
    assert (": a tie" in flat(given.stdout)) == kept["tie"] == ("beside it: a tie." in both)


def test_a_state_is_held_against_the_memory_of_a_device(gradcomp) -> None:
    asked = ("plan", "--model", "llama-8b", "--step-time", "2s", "--workers", "8", "--methods", "dgc", *SECONDS)
    asked += ("--platform", "h100")
    state = gc.predict(gc.Workload.of(MODELS["llama-8b"](), 2.0), gc.Cluster(8, gc.Link(1e9, 0.0)), "dgc").state
    keeps = f"State: dgc keeps {units.show_bytes(state)} on each worker: "
    assert f"{keeps}--device-memory says whether it fits." in flat(gradcomp(*asked).stdout)
    large = flat(gradcomp(*asked, "--device-memory", "141GB").stdout)
    assert f"{keeps}{state / 141e9:.0%} of a device's 141 GB." in large
    small = gradcomp(*asked, "--device-memory", "80GB", "--methods", "dgc,topk-sgd,qsgd")
    assert "left out" not in small.stdout and small.stdout.startswith("Compress: dgc")
    small = gradcomp(*asked, "--device-memory", "40GB", "--methods", "dgc,qsgd")
    assert small.stdout.startswith("Compress: qsgd")
    assert "left out: 1 methods, because their state does not fit into a device (--all)." in flat(small.stdout)
    assert (
        "does not fit into the 40,000,000,000 of a device"
        in gradcomp(*asked, "--device-memory", "40GB", "--methods", "dgc,qsgd", "--all").stdout
    )


@pytest.mark.parametrize(
    ("words", "whose", "why"),
    [
        (("--cluster", "v5e-16x4"), "v5e's figures, compiled", ""),
        (("--platform", "h100"), "h100's figures, estimated", ""),
        (
            ("--cluster", "v5e-16x4", "--platform", "a100", "--memory-rate", "1TB/s"),
            "a100's figures at 1 TB/s, estimated",
            "",
        ),
        ((), "cpu's figures, measured", "which JAX finds here"),
    ],
)
def test_every_output_says_whose_figures_and_how_they_were_found(gradcomp, tmp_path, words, whose, why) -> None:
    """The verdict, the line above the table, each row and the notes, and the file."""
    asked = ("plan", "--params", "5M", "--methods", "dgc", *words)
    short = gradcomp(*asked, "--out", "made")
    assert short.exit_code == 0, short.stderr
    assert f"Arithmetic by {whose}{f' ({why}; --platform says another)' if why else ''}." in flat(short.stdout)
    assert f"; arithmetic by {whose}" in flat(short.stdout)
    everything = gradcomp(*asked, "--all").stdout
    name, how = whose.split("'")[0], whose.split(", ")[1]
    assert f"compress: {whose}; {name}: {PLATFORMS[name].source[:20]}" in everything
    assert all(f"{name}, {how}" in line for line in everything.splitlines() if line.startswith(("dgc ", "dense ")))
    kept = json.loads((tmp_path / "made" / "plan.json").read_text())
    assert kept["platform"]["name"] == name and kept["platform"]["source"] == PLATFORMS[name].source
    assert kept["platform"]["why"] == why and {p["figures"] for p in kept["predictions"]} == {f"{name}, {how}"}


@pytest.mark.slow
def test_a_cluster_by_name_has_its_links_and_options_change_it(gradcomp, tmp_path) -> None:
    for name, preset in CLUSTERS.items():
        result = gradcomp("plan", "--params", "25M", "--cluster", name, "--methods", "dgc", "--out", name)
        assert result.exit_code == 0, result.stderr
        kept = json.loads((tmp_path / name / "plan.json").read_text())
        assert kept["cluster"] == json.loads(json.dumps(dataclasses.asdict(preset.cluster)))
        assert kept["device_memory"] == preset.memory and kept["platform"]["name"] == preset.platform
    words = ("--cluster", "v5e-16x4", "--workers", "32", "--link", "25Gbit", "--device-memory", "32GB")
    assert gradcomp("plan", "--params", "25M", *words, "--methods", "dgc", "--out", "own").exit_code == 0
    kept = json.loads((tmp_path / "own" / "plan.json").read_text())
    assert kept["cluster"]["workers"] == 32 and kept["cluster"]["per_node"] == 16 and kept["device_memory"] == 32e9
    assert kept["cluster"]["outer"]["rate"] == 25e9 / 8 and kept["cluster"]["inner"]["rate"] == 200e9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what is trained with one of --params, --model and --from"),
        (("--params", "5M", "--model", "vgg16"), "one of --params, --model and --from, got --params and --model"),
        (("--model", "vgg61"), "unknown model 'vgg61'; did you mean 'vgg16'"),
        (("--params", "5M", "--cluster", "h100"), "unknown cluster 'h100'; did you mean 'h100x8-100G'"),
        (("--params", "5M", "--platform", "v5"), "unknown platform 'v5'; did you mean 'v5p'"),
        (("--params", "5M", "--task", "vit"), "task must be one of 'conv', 'transformer', 'lstm', got 'vit'"),
        (("--params", "5M", "--optimizer", "sdg"), "did you mean 'sgd'"),
        (
            ("--params", "5M", "--device-memory", "80"),
            "--device-memory must be a number with B, such as 80GB, got '80'",
        ),
        (("--params", "five"), "--params must be a number, such as 25.6M"),
        (("--params", "5M", "--link", "10"), "--link must be a number with bit/s or B/s"),
        (("--params", "5M", "--latency", "-1ms"), "--latency must be at least 0"),
        (("--params", "5M", "--workers", "60", "--per-node", "8"), "60 workers do not fill nodes of 8: take 56 or 64"),
        (("--params", "5M", "--workers", "8", "--per-node", "16"), "8 workers do not fill nodes of 16: take 16"),
        (("--params", "5M", "--workers", "1"), "workers must be at least 2"),
        (("--params", "5M", "--overlap", "2"), "overlap must be in [0, 1]"),
        (("--params", "5M", "--topology", "star"), "topology must be one of"),
        (("--params", "5M", "--methods", "terngard"), "did you mean 'terngrad'"),
        (("--params", "5M", "--methods", "dense"), "methods must name one to compare with dense and dense_bf16"),
        (("--params", "5M", "--methods", ","), "methods must name one to compare with dense and dense_bf16, got none"),
        (("--params", "5M", "--from", "x"), "one of --params, --model and --from, got --params and --from"),
        (("--from", "nowhere"), "--from must be MODULE:NAME"),
        (("--params", "5M", "--calibration", "none.json"), "cannot read none.json"),
        (("--params", "5M", "--prices", "none.json"), "cannot read none.json"),
    ],
)
def test_nonsense_is_one_clear_sentence(gradcomp, words, message) -> None:
    result = gradcomp("plan", "--all", *words)
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
