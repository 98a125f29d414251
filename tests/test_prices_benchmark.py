"""Prices in steps from curves, by arithmetic; and those of the package are what the committed runs give."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from benchmarks import packed
from benchmarks.adamw import price, runs
from benchmarks.adamw.rows import ROWS
from benchmarks.adamw.task import TASKS
from benchmarks.prices import PROTOCOL
from benchmarks.training import curves, prices
from benchmarks.training.curves import Curves, epochs_to
from gradcomp_jax.methods import METHODS
from gradcomp_jax.planning.prices import from_dict, measured

PROTOCOL_RUNS = runs.Results.read(TASKS[PROTOCOL.name], PROTOCOL)

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

ROOT = pathlib.Path(__file__).parents[1]
RUNS = ROOT / "docs" / "results" / "runs"
# Not in the source distribution.
needs_runs = pytest.mark.skipif(not RUNS.is_dir(), reason="the results of runs are in a checkout alone")


def dense_run() -> dict:
    runs = packed.read(RUNS / "enwik8-long")
    return next(run for name, run in runs.items() if name.startswith("dense") and name.endswith("seed-0"))


DENSE = tuple(4 / (1 + t) for t in range(1, 11))


def made(method: str, *values: tuple[float, ...], metric: str = "bits per character", **more) -> Curves:
    given = {"options": {}, "workers": 8, "steps": 120.0, "settings": {"density": 0.01}, "sent": 100.0} | more
    return Curves("enwik8", method, metric=metric, values=dict(enumerate(values)), **given)


def slower(factor: float) -> tuple[float, ...]:
    """A run as long in which everything takes that many times the steps of DENSE."""
    return tuple(4 / (1 + t / factor) for t in range(1, 11))


def test_epochs_are_counted_on_straight_lines() -> None:
    best = (1.0, 1.0, 3.0)
    assert epochs_to(1.0, best) == 1 and epochs_to(2.0, best) == 2.5 and epochs_to(3.0, best) == 3
    assert epochs_to(0.0, best) == 1 and math.isinf(epochs_to(3.1, best))


@pytest.mark.parametrize("metric", ["bits per character", "accuracy"])
@pytest.mark.parametrize("factor", [0.8, 1.0, 1.1, 1.2])
def test_a_price_is_the_factor_of_steps(metric: str, factor: float) -> None:
    """Between two epochs a straight line lies above the curve, by little."""
    sign = -1 if metric == "accuracy" else 1
    own, dense = (made("dgc", tuple(sign * v for v in values), metric=metric) for values in (slower(factor), DENSE))
    found = prices.price(own, dense)
    assert found.reached and found.steps == pytest.approx(factor, rel=0.02)
    assert found.seeds == 1 and found.spread is None and found.task == "enwik8"


@pytest.mark.parametrize("options", [{"optimizer": "adamw"}, {"epochs": 16}], ids=str)
def test_steps_are_against_dense_with_the_same_optimizer_and_as_many_epochs(options) -> None:
    both = {"options": options}
    runs = [made("dense", DENSE), made("dense", slower(2.0), **both), made("terngrad", slower(2.0), **both)]
    rows = {line.split("|")[2].strip(): line.split("|")[4].strip() for line in prices.table(runs)[2:]}
    ((name, value),) = options.items()
    assert rows[f"terngrad, {name} {value}"] == "1.00x"
    assert [p.steps for p in prices.package([runs], page="")["terngrad"]] == [1.0]


def test_what_does_not_clip_is_held_against_dense_without_clipping() -> None:
    runs = [made("dense-bf16-clip", DENSE), *(made(name, slower(1.2)) for name in ("dense-bf16", "block-quantized"))]
    runs += [made(name, slower(1.2)) for name in ("dgc-paper", "dgc-no-clip")]
    rows = {line.split("|")[2].strip(): line.split("|")[4].strip() for line in prices.table(runs)[2:]}
    alone = {name for name, price in rows.items() if price == "1.00x"}
    assert alone == {"dense-bf16-clip", "block-quantized", "dgc-no-clip"}
    assert [p.steps for p in prices.package([runs], page="")["block_quantized"]] == [1.0]


def test_a_warm_up_counts_as_the_dense_steps_that_send_as_much() -> None:
    """Bytes of dense in bfloat16 are half of those of the dense steps."""
    dense = made("dense-bf16", DENSE, sent=1000.0)
    own = made("one-bit-adam", DENSE, sent=100 + 0.15 * 1900, warm_up=0.15 * 1900)
    assert prices.price(own, dense).dense_steps == pytest.approx(0.15)
    assert prices.price(own, made("dense", DENSE, sent=2000.0)).dense_steps == pytest.approx(0.15)
    assert prices.price(made("dgc", DENSE), dense).dense_steps == 0


@pytest.mark.parametrize(
    ("method", "row", "settings", "expected"),
    [
        ("topk-sgd", {}, {"density": 0.01}, ""),
        ("topk-sgd", {"density": 0.01}, {"density": 0.01}, ""),
        ("topk-sgd", {"density": 0.001}, {"density": 0.001}, "density 0.001"),
        ("topk-sgd", {}, {"density": 0.001, "optimizer": "adamw"}, "density 0.001"),
        ("dgc", {"epochs": 16}, {"density": 0.001, "optimizer": "sgd"}, ""),
        ("dgc", {"density": 0.001}, {"density": 0.001, "optimizer": "adamw"}, "momentum 0"),
        ("demo", {"density": 0.01}, {"density": 0.01, "optimizer": "adamw"}, "density 0.01"),
        ("powersgd", {}, {"density": 0.01, "optimizer": "adamw"}, ""),
        ("diloco", {"every": 30}, {"density": 0.01}, "every 30"),
    ],
)
def test_options_are_those_that_a_method_does_not_have_by_default(method, row, settings, expected) -> None:
    assert prices.options_of(made(method, DENSE, options=row, settings=settings)) == expected


@needs_runs
@pytest.mark.parametrize("better", [0.5, 2.0])
def test_of_several_rates_the_curve_is_of_the_one_that_tuning_found_best(tmp_path, better: float) -> None:
    run = dense_run()
    for rate, seeds in ((0.5, 1), (1.0, 3), (2.0, 2)):
        for seed in range(seeds):
            kept = {**run, "learning_rate": rate, "seed": seed}
            (tmp_path / f"{rate}-{seed}.json").write_text(json.dumps(kept))
    (most,) = curves.of_runs(tmp_path)
    assert len(most.values) == 3
    for rate in (0.5, 1.0, 2.0):
        judged = [1.0 if rate == better else 2.0]
        kept = {**run, "tuning": True, "learning_rate": rate, "evaluation": judged}
        (tmp_path / f"{rate}-tuning.json").write_text(json.dumps(kept))
    (one,) = curves.of_runs(tmp_path)
    assert len(one.values) == {0.5: 1, 2.0: 2}[better]
    # Whole runs on the validation part say more, where each rate has one.
    for rate, seeds in ((1.0, len(one.values)), (2.0, len(one.values)), (0.5, 3)):
        path = tmp_path / f"{rate}-0.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"validation": abs(rate - 1.0)}))
        (one,) = curves.of_runs(tmp_path)
        assert len(one.values) == seeds


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0])
def test_what_does_not_come_so_far_has_a_lower_bound(factor: float) -> None:
    found = prices.price(made("dgc", slower(factor)), made("dense", DENSE))
    assert not found.reached and found.steps == pytest.approx(factor, rel=0.02)
    # A curve that stands still costs more the longer it does.
    still = prices.price(made("dgc", (3.0,) * 10), made("dense", DENSE))
    assert not still.reached and still.steps == 10.0


def test_the_package_has_the_highest_price_of_default_options() -> None:
    default = METHODS["dgc"].make.__wrapped__.__kwdefaults__["density"]
    dense = made("dense-bf16", DENSE)
    dgc = [made("dgc", slower(f), settings={"density": d}) for f, d in ((1.2, 0.05), (1.1, default), (1.15, default))]
    found = prices.package([[dense, one] for one in (*dgc, made("diloco", DENSE))], page="page.md")
    assert set(found) == {"dgc"}
    (one,) = found["dgc"]
    assert one.steps == pytest.approx(1.15, rel=0.02) and one.options == ""
    assert (one.kind, one.optimizer, one.workers) == ("transformer", "sgd", 8)
    found = prices.package([[dense, dgc[0]]], page="page.md")
    (one,) = found["dgc"]
    assert one.options == "density 0.05" and one.page == "page.md"
    # A dense run that others of the task leave behind has no price: it sends the same.
    clipped = [made("dense-bf16-clip", DENSE), made("dense-bf16", slower(2.0)), dgc[2]]
    assert set(prices.package([clipped], page="")) == {"dgc"}
    # Without a dense one of as many workers there is nothing to compare with.
    assert not prices.package([[dense, made("dgc", DENSE, workers=4)]], page="")
    kept = json.loads(json.dumps(prices.as_json(found)))
    assert from_dict({name: each[0] for name, each in kept.items()}) == {"dgc": one}


def run(folder: pathlib.Path, method: str, seed: int, values, *, tuning=False, rate=0.1, **row) -> None:
    fields = {
        "task": "enwik8",
        "row": {"method": method, "every": None, "density": None, **row},
        "workers": 8,
        "seed": seed,
        "learning_rate": rate,
        "tuning": tuning,
        "metric": "bits per character",
        "evaluation": values,
        "loss_of_ten_steps": [1.0] * 12 * len(values),
        "wire": {"sent": 100, "sent_mean": 100.0, "sent_most": 100, "stages": []},
        "settings": {"density": 0.01, "every": 4},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{method}-{row}-{seed}-{tuning}-{rate}.json").write_text(json.dumps(fields))


def test_runs_and_comparisons_are_read(tmp_path) -> None:
    for seed in (0, 1):
        run(tmp_path, "dense-bf16", seed, list(DENSE))
        run(tmp_path, "diloco", seed, [3.0, None], every=30)
    run(tmp_path, "diloco", 0, [1.0, 1.0], every=30, rate=0.2)
    run(tmp_path, "dense-bf16", 0, [1.0], tuning=True)
    found = {one.name: one for one in curves.read(tmp_path)}
    assert set(found) == {"dense-bf16", "diloco, every 30"}
    assert found["dense-bf16"].steps == 120 and found["dense-bf16"].values == {0: DENSE, 1: DENSE}
    assert found["diloco, every 30"].mean[0] == 3.0 and math.isnan(found["diloco, every 30"].mean[1])
    again = tmp_path / "again.json"
    again.write_text(next(tmp_path.glob("dense-bf16*False*")).read_text())
    with pytest.raises(ValueError, match="has the row, workers, rate and seed of another run"):
        curves.read(tmp_path)
    kept = {
        "dataset": "digits",
        "settings": {"workers": 4, "epochs": 2, "density": 0.01},
        "methods": [
            {
                "method": m,
                "wire": {"sent_mean": 5.0},
                "runs": [{"seed": 0, "loss": [1.0] * 6, "evaluation": [0.5, 0.9]}],
            }
            for m in ("dense", "dgc")
        ],
    }
    (tmp_path / "compare.json").write_text(json.dumps(kept))
    dense, dgc = curves.read(tmp_path / "compare.json")
    assert (dense.task, dense.steps, dense.metric, dgc.workers) == ("digits", 3.0, "accuracy", 4)
    (row,) = [line for line in prices.table([dense, dgc]) if "| dgc |" in line]
    assert row.split("|")[4].strip() == "1.00x"


@needs_runs
def test_the_packages_prices_are_those_of_the_committed_runs() -> None:
    """Both are empty until runs are committed: `python benchmarks/prices.py --write docs/results/prices.md`."""
    kept = {name: list(each) for name, each in measured().items()}
    page = "docs/results/prices.md"
    tasks, protocol = (
        prices.read(prices.tasks_in(RUNS)),
        price.prices(PROTOCOL_RUNS, task="enwik8", page=page),
    )
    assert prices.merged(prices.package(tasks, page=page), protocol) == kept
    text = (ROOT / page).read_text(encoding="utf-8")
    for one in (one for each in kept.values() for one in each):
        assert one.kind and one.optimizer and one.page == page
        assert f"| {one.task} | " in text and str(one) in text


def test_a_price_of_the_protocol_is_the_runs_steps_over_denses() -> None:
    """Dense has 4 - log10(steps) bits; a method that has at 4,000 steps what dense has at 2,000 needs twice the steps."""

    def result(name: str, rate: float, steps: int, bits: float) -> dict:
        fields = {"row": name, "rate": rate, "steps": steps, "seed": 0}
        return {"run": fields, "validation": abs(rate - 0.004), "test": bits}

    found = {}
    for name in ("dense", "sparse_adamw, 0.01", "TernGrad", "dense, b1=0"):
        for rate in ROWS[name].rates:
            found[runs.Run(name, rate, 4_000, 0).name] = result(name, rate, 4_000, 4 - math.log10(2_000))
    for steps in TASKS["65k-1"].lengths:
        found[runs.Run("dense", 0.004, steps, 0).name] = result("dense", 0.004, steps, 4 - math.log10(steps))
    found[runs.Run("TernGrad", 0.004, 4_000, 0).name]["test"] = 4 - math.log10(500)
    made = price.prices(runs.Results(TASKS["65k-1"], found), task="enwik8", page="page.md")
    assert set(made) == {"topk_two_bits", "terngrad"}
    (sparse,), (ternary,) = made["topk_two_bits"], made["terngrad"]
    assert (sparse.steps, sparse.reached, sparse.seeds, sparse.task) == (2.0, True, 1, "enwik8, 4,000 steps")
    assert (ternary.steps, ternary.reached) == (4.0, False)


def test_the_command_without_runs_says_so(tmp_path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "prices.py"), "--runs", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert found.returncode == 0 and "there are no runs" in found.stdout
    found = subprocess.run([*command, "--write", "page.md"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert found.returncode == 2 and "leave --runs out" in found.stderr
