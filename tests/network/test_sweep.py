"""The parts of the network benchmark: links by name, bounds, the model of the overhead, tables; and one run from end to end."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import lab
from benchmarks.sweep import bounds, checks, links, measure, report, run, schedules, tasks
from benchmarks.sweep.team import Step

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text, rate",
    [("unshaped", None), ("100Mbit", 1e8), ("1Gbit", 1e9), ("1gbit/s", 1e9), ("2.5 kbit", 2500.0), ("20Mbit/s", 2e7)],
)
def test_rates_are_read_and_written(text: str, rate: float | None) -> None:
    assert links.parse_rate(text) == rate
    assert links.parse_rate(links.rate_name(rate)) == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "100MB", "0Mbit", "-1Mbit", "100Mbits"])
def test_what_is_not_a_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="100Mbit"):
        links.parse_rate(text)


@pytest.mark.parametrize("text, seconds", [("0", 0.0), ("0ms", 0.0), ("25ms", 0.025), ("1.5 s", 1.5)])
def test_delays_are_read(text: str, seconds: float) -> None:
    assert links.parse_delay(text) == seconds
    assert links.parse_delay(links.delay_name(seconds)) == seconds


@pytest.mark.parametrize("text", ["25", "fast", "-1ms", "1min"])
def test_what_is_not_a_delay_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="25ms"):
        links.parse_delay(text)


def test_overhead_admits_tcp_and_no_more() -> None:
    payload = 10_000_000
    least, most = bounds.counted_range(payload, payload, 3, 4, 1.0)
    segments = payload / bounds.SEGMENT
    # What a rate-limited link counts: a header for each segment, and acknowledgements of the other direction.
    tcp = payload + segments * bounds.HEADER * 1.5
    assert least < payload < tcp < most
    # A method that sent a byte where it says seven bits, or every payload twice, would be found.
    assert most < 8 / 7 * payload
    # In a small message the handshakes are most of it, and they do not grow with what is in it.
    tiny, small = (bounds.counted_range(size, size, 3, 4, 1.0)[1] for size in (100, 1100))
    assert small - tiny < 1.2 * 1000


class Pretended:
    """Workers whose every step takes as long as they are told."""

    workers = 2

    def __init__(self, seconds: float) -> None:
        self._step = Step(seconds, 0.0)
        self.facts = {"values": 10, "source": "none"}

    def step(self, name: str, number: int, *, alone: bool = False) -> Step:
        return self._step

    def release(self) -> None: ...


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 3), (1e6, measure.MOST)])
def test_rounds_go_on_while_there_is_time(seconds: float, steps: int) -> None:
    fact = {"sent": 10, "received": 10, "collectives": {"all-reduce": 1}}
    # Of the second, the bytes alone take more than five seconds.
    facts = {"dgc": fact, "dense": fact | {"sent": 10**9}}
    link = links.Cell("lstm", 2, 1e6, 0.0)
    found = measure.measure(
        link, Pretended(0.5), None, facts, {"dgc": 0.1, "dense": 0.1}, measure.Clock(), rounds=3, seconds=seconds
    )
    assert {name: row["steps"] for name, row in found["methods"].items()} == {"dgc": steps, "dense": 2}
    assert found["nothing_s"] == 0.5


def cell(rate: float | None = 1e8, *, values: int = 13_000_000, **step_s: float) -> dict:
    """A cell in which no exchange takes 1 s, and a method what is given."""
    found = {
        name.replace("_", "-"): {
            "step_s": t,
            "range_s": [t, t],
            "steps": 3,
            "alone_s": 1.1,
            "bound_s": max(1.1, t / 1.2),
            "sent": 1000,
            "collectives": {"all-reduce": 1},
            "counted": 1010.0,
            "counted_most": 1020.0,
            "agrees": True,
        }
        for name, t in step_s.items()
    }
    link = links.Cell("lstm", 4, rate, 0.0)
    return {
        "key": link.key,
        "model": "lstm",
        "workers": 4,
        "rate": rate,
        "delay_s": 0.0,
        "values": values,
        "source": "made-up text",
        "nothing_s": 1.0,
        "nothing_range_s": [1.0, 1.0],
        "methods": found,
    }


def holds(cells: list[dict]) -> list[bool | None]:
    return [check.holds for check in checks.checks(cells)]


def test_checks_pass_and_fail_by_the_numbers() -> None:
    good = cell(dense=21.0, block_quantized_int4=5.0, dgc=1.9)
    fast = cell(1e9, dense_bf16=2.0, dgc=1.5)
    assert holds([good, fast]) == [True, True, True, True, True]
    slow = cell(dense=21.0, block_quantized_int4=7.0, dgc=3.0)
    slow["methods"]["dgc"]["bound_s"] = 2.0
    slow["methods"]["dgc"]["agrees"] = False
    losing = cell(1e9, dense_bf16=2.0, dgc=2.5)
    assert holds([slow, losing]) == [False, False, False, False, False]


def results(*cells: dict) -> dict:
    machine = {"processor": "P", "cores": 2, "memory_gib": 4, "system": "Linux"}
    training = {"lstm": {"workers": 4, "source": "s", "losses": {"dense": [9.0 - 0.1 * i for i in range(20)]}}}
    return {"machine": machine, "versions": {"jax": "1"}, "cells": list(cells), "training": training}


def test_report_marks_what_loses() -> None:
    text = report.markdown(results(cell(dense=2.0, dense_bf16=1.5, dgc=1.6)), "python it")
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ") and "x" in line}
    assert "**2 (" in rows["dense"] and "**1.6 (" in rows["dgc"]
    assert "**" not in rows["dense-bf16"]
    # 14 steps to the target at two seconds each.
    assert "| dense | 14 | 28 |" in text


def test_the_document_has_the_markers() -> None:
    assert "X" in report.insert((ROOT / "docs" / "network.md").read_text(), "X")


def test_only_what_is_missing_is_measured_again() -> None:
    done = cell(dgc=1.0)
    wanted = [links.Cell("lstm", 4, 1e8, 0.0), links.Cell("lstm", 4, 1e9, 0.0)]
    assert run.pending(wanted, results(done), ["dgc"]) == wanted[1:]
    assert run.pending(wanted, results(done), ["dgc", "dense"]) == wanted


def some_parts(count: int) -> list[schedules.Parts]:
    """Steps of all kinds: computation, exchange or handling may be most of it."""
    random = np.random.default_rng(0)
    return [
        schedules.Parts(*random.exponential(size=4), bound=1.0, first=share)
        for share in (0.0, 1.0, *random.random(count - 2))
    ]


def test_parts_add_up_to_the_step() -> None:
    slow, fast = cell(dense=21.0, dgc=1.9), cell(None, dense=1.4, dgc=2.5)
    for method, seconds in (("dense", 21.0), ("dgc", 1.9)):
        slow["methods"][method]["range_s"] = [seconds - 0.5, seconds]
        found = schedules.parts(slow, fast, method, 0.5)
        assert schedules.sequence(found) == pytest.approx(seconds)
        least = schedules.parts(slow, fast, method, 0.5, least=True)
        assert schedules.sequence(least) == pytest.approx(seconds - 0.5)
        assert found.computation == 1.1 and found.wire == 8 * 1000 / 1e8 and found.handling >= 0
    assert schedules.parts(slow, fast, "dense", 0.5).handling == pytest.approx(1.4 - 1.1)


def test_tensors_one_by_one_are_never_faster_than_the_model() -> None:
    """A step is played: gradients come one after the other, and each tensor crosses when it is done and the link is free."""
    random = np.random.default_rng(1)
    for p in some_parts(100):
        p = p._replace(handling=0.0)
        shares = random.dirichlet(np.ones(5)) * (1 - p.first)
        computed = random.dirichlet(np.ones(6)) * (1 - schedules.FORWARD) * p.computation
        now, free = schedules.FORWARD * p.computation, 0.0
        for takes, share in zip(computed, (*shares, p.first), strict=True):
            now += takes
            free = max(now, free) + share * (p.wire + p.beyond)
        assert free >= schedules.backward(p) * (1 - 1e-12)


def test_the_page_has_what_is_modelled_from_the_measured_cells() -> None:
    kept = json.loads((ROOT / "docs" / "results" / "network.json").read_text())
    assert "\n".join(schedules.tables(kept["cells"])) in (ROOT / "docs" / "network.md").read_text()


def test_workers_read_different_text() -> None:
    source, batches = tasks.read_text(100)
    assert source
    first, second = batches(0, 0, 2), batches(0, 1, 2)
    assert first[0].shape == first[1].shape == (5, 35)
    assert (first[0][:, 1:] == first[1][:, :-1]).all()
    assert (first[0] != second[0]).any()
    # Reading on: the next batch starts with the word that the last one ended on.
    assert (batches(1, 0, 2)[0][:, 0] == first[1][:, -1]).all()


@pytest.mark.network
@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))
def test_end_to_end(tmp_path: pathlib.Path) -> None:
    kept = tmp_path / "network.json"
    document = tmp_path / "network.md"
    document.write_text(f"{report.START}\n{report.END}\n")
    words = ["--models", "tiny", "--workers", "2", "--rates", "20Mbit", "--delays", "5ms", "--rounds", "2", "--train"]
    words += ["--methods", "dense", "dgc", "--json", str(kept), "--markdown", str(document)]
    command = [sys.executable, str(ROOT / "benchmarks" / "network.py"), *words]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(kept.read_text())["cells"]
    for name, row in measured["methods"].items():
        assert row["agrees"], (name, row)
        # The exchange waits for both delays of a round trip at the least.
        assert row["step_s"] > 0.01
    assert measured["nothing_s"] < measured["methods"]["dense"]["step_s"]
    assert "| dgc |" in document.read_text()
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=600, env=environment)
    assert again.returncode == 0 and "compiling" not in again.stdout


def test_report_goes_between_the_markers() -> None:
    document = f"before\n{report.START}\nold\n{report.END}\nafter\n"
    text = report.insert(document, "new")
    assert text == f"before\n{report.START}\n\nnew\n{report.END}\nafter\n"
    with pytest.raises(ValueError, match="needs the lines"):
        report.insert("nothing", "new")
