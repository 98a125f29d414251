"""Seconds to a loss, composed: by arithmetic, and the page says what its tables do."""

import dataclasses
import json
import math
import sys

import pytest

pytest.importorskip("sklearn")

from benchmarks import time_to_accuracy
from benchmarks.tasks.tasks import TASKS
from benchmarks.training import seconds, time_page, time_to_loss
from benchmarks.training.curves import Curves
from benchmarks.training.seconds import Worker, float32, step, traffic
from gradcomp_jax.planning import Link

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks]

SETTINGS = dataclasses.asdict(dataclasses.replace(TASKS["digits"].settings, workers=4, every=5))
WORKER = Worker(5e-3, 20e9)
SLOW, FAST = Link.of_bits(20e6, 1e-4), Link.of_bits(10e9, 1e-4)


def made(method: str, values: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95), sent: float | None = None) -> Curves:
    one = Curves("digits", method, {}, 4, "accuracy", 20.0, {0: values}, SETTINGS, 0.0)
    return dataclasses.replace(one, sent=traffic(one).sent if sent is None else sent)


def of(curves: Curves, link: Link, **options) -> seconds.Step:
    return step(curves, traffic(curves), WORKER, link, **options)


def test_the_baseline_has_the_best_of_what_dense_can_be() -> None:
    """Buckets hide two thirds of the computation at most; where latency is all there is, one exchange is better."""
    dense = made("dense-bf16")
    for link in (SLOW, FAST, Link(math.inf, 0.1)):
        plain, best = of(dense, link, buckets=False), of(dense, link)
        assert best.exposed <= plain.exposed
        assert plain.exposed - best.exposed <= seconds.OVERLAP * WORKER.compute
    assert of(dense, Link(math.inf, 0.1)) == of(dense, Link(math.inf, 0.1), buckets=False)
    assert of(dense, SLOW).exposed < of(dense, SLOW, buckets=False).exposed
    found = composed()
    for rate in found.rates:
        plain = of(float32(dense), Link.of_bits(rate, 1e-4))
        assert found.seconds["dense-bf16", rate].total == min(of(dense, Link.of_bits(rate, 1e-4)).total, plain.total)


def test_an_exchange_now_and_then_counts_by_its_share() -> None:
    every = made("local-sgd")
    fifth = dataclasses.replace(every, sent=every.sent / 5)
    one, other = of(every, SLOW), of(fifth, SLOW)
    assert other.exposed == pytest.approx(one.exposed / 5) and other.compress == pytest.approx(one.compress / 5)
    # A warm-up sends more in as many messages.
    late = Link(math.inf, 0.01)
    dgc = made("dgc")
    assert of(dataclasses.replace(dgc, sent=6 * dgc.sent), late).exposed == pytest.approx(of(dgc, late).exposed)


def composed() -> time_to_loss.Composed:
    curves = [
        made("dense-bf16"),
        made("topk-sgd", (0.4, 0.6, 0.8, 0.95)),
        made("sign-sgd", (0.4, 0.5, 0.6, 0.7)),
        made("dgc", (0.5, 0.8, 0.9, 0.95)),
    ]
    return time_to_loss.compose(curves, WORKER, workers=4, latency=1e-4)


def test_seconds_are_steps_times_seconds() -> None:
    found = composed()
    dense, dgc, topk, sign = found.curves
    assert found.dense is dense and found.target == pytest.approx(0.99 * 0.95)
    assert found.steps(dense) == pytest.approx(20 * (3 + (found.target - 0.9) / 0.05))
    assert found.steps(topk) == pytest.approx(20 * (3 + (found.target - 0.8) / 0.15))
    assert math.isinf(found.steps(sign)) and all(math.isinf(found.ratio(sign, rate)) for rate in found.rates)
    whole = 4 * 20 * found.seconds["sign-sgd", 20e6].total
    assert found.more_than(sign, 20e6) == pytest.approx(whole / found.time(dense, 20e6))
    for rate in found.rates:
        assert found.ratio(dense, rate) == 1
        # As many steps: only seconds differ.
        seconds_of = {one.name: found.seconds[one.name, rate].total for one in found.curves}
        assert found.ratio(dgc, rate) == pytest.approx(seconds_of["dgc"] / seconds_of["dense-bf16"])
    assert found.ratio(dgc, 20e6) < found.ratio(dgc, 10e9)


def test_the_fastest_are_so_over_some_link() -> None:
    """A method counts if it is the first at what it ends at; the baseline always does."""
    found = composed()
    dense, dgc, topk, sign = found.curves
    # DGC's curve is dense's, in less time over slow links and in more over fast ones; the others are behind it over all.
    assert found.ratio(dgc, 20e6) < 1 < found.ratio(dgc, 10e9)
    assert found.fastest() == [dense, dgc]
    early = made("powersgd", (0.6, 0.6, 0.6, 0.6), sent=100.0)
    found = time_to_loss.compose([*found.curves, early], WORKER, workers=4, latency=1e-4)
    assert found.fastest() == [dense, dgc, early] and found.curves == (dense, dgc, topk, sign, early)


def test_the_page_says_what_its_tables_do(tmp_path) -> None:
    found = composed()
    page = tmp_path / "page.md"
    time_page.write(found, page, "python x.py", "Both given.")
    text = page.read_text()
    for name in ("page.png", "page-map.png"):
        assert name in text and (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "**Composed:**" in text and "| sign-sgd |" in text and text.count("not reached (> ") == len(found.rates)
    slower = sum(1 < found.ratio(one, rate) < math.inf for one in found.compressed for rate in found.rates)
    assert slower and len([cell for cell in text.split("|") if cell.strip().startswith("**")]) == slower
    for paper in ("2103.00543", "2407.01378", "2006.10103"):
        assert text.count(f"https://arxiv.org/abs/{paper}") == 1
    strong = time_to_loss.wins(found, found.rates)
    assert (
        f"Here {strong} of {3 * len(found.rates)} cells" in text and "Of 3 methods, 1 never came to the target" in text
    )


def test_it_needs_a_dense_run_and_another_one() -> None:
    with pytest.raises(
        ValueError, match="needs a run of dense-bf16-clip or dense-bf16 or dense and another one with 4 workers"
    ):
        time_to_loss.compose([made("dgc")], WORKER, workers=4, latency=0.0)
    with pytest.raises(ValueError, match="with 2 workers; there are 4"):
        time_to_loss.compose([made("dense"), made("dgc")], WORKER, workers=2, latency=0.0)
    with pytest.raises(ValueError, match="with 4 workers and 8 epochs; there are 4 workers"):
        time_to_loss.compose([made("dense"), made("dgc")], WORKER, workers=4, latency=0.0, epochs=8)


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    runs = [
        {"method": m, "wire": {"sent_mean": sent}, "runs": [{"seed": 0, "loss": [1.0] * 40, "evaluation": [0.5, 0.9]}]}
        for m, sent in (("dense-bf16", 1e5), ("topk-sgd", 1e3))
    ]
    kept = {"dataset": "digits", "settings": SETTINGS | {"epochs": 2}, "methods": runs}
    (tmp_path / "compare.json").write_text(json.dumps(kept))
    page = tmp_path / "page.md"
    words = [str(tmp_path / "compare.json"), "--step", "5ms", "--copy-rate", "20GB/s", "--rates", "100Mbit", "1Gbit"]
    monkeypatch.setattr(sys, "argv", ["time_to_accuracy.py", *words, "--write", str(page)])
    time_to_accuracy.main()
    printed = capsys.readouterr().out
    assert "| method | fewer bytes than dense | seeds | steps to it | 100 Mbit/s | 1 Gbit/s |" in printed
    assert "--step 5ms" in page.read_text() and "Both given." in page.read_text()
    monkeypatch.setattr(sys, "argv", ["time_to_accuracy.py", words[0]])
    with pytest.raises(SystemExit):
        time_to_accuracy.main()
    assert "one of --measure and --step" in capsys.readouterr().err
