"""Islands that train a character model over slow, late links to one bucket: loss, goodput, bytes, and whether anything is lost.

    python benchmarks/islands_training.py --quick
    python benchmarks/islands_training.py --json docs/results/islands.json --write docs/islands.md

The second takes half an hour on two cores, and needs enwik8 (benchmarks/data.py). The model and its batches are those of
docs/results/protocol.md, one sequence a step on each island. A step takes at least 50 ms, as on an accelerator that leaves
the host free. Every island is a process in a network namespace of its own, and so is the S3 server (moto); links are
emulated, which needs root on Linux. Without it islands share this machine's loopback, unshaped, and nothing is cut off.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import lab
from benchmarks.pages import write_between
from benchmarks.world import bucket
from benchmarks.world.island import Settings
from gradcomp_jax import _markdown

ROOT = pathlib.Path(__file__).resolve().parents[1]
PORT = 5055
NAMES = ("ohio", "california", "london", "tokyo", "sydney")
FASTEST, SLOWEST = (63e6, 0.035), (13e6, 0.277)
"""Rate and round trip between the places of the talk that this project was made from."""
CHECKED_S = 90.0
"""Seconds in which islands that are done must have closed."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens to islands in a run, at parts of its length.

    Attributes:
        slow: how many times as long a step of the second island takes.
        killed: when the first island is killed, and started again at once.
        late: when the last island comes.
        apart: from when to when the second island is cut off.
        away: from when the store is cut off from all.
        away_s: for how many seconds.
    """

    slow: float = 1.0
    killed: float | None = None
    late: float = 0.0
    apart: tuple[float, float] | None = None
    away: float | None = None
    away_s: float = 60.0


PLANS = {
    "nothing happens": Plan(),
    "one slow, killed, late, cut off; store away for a minute": Plan(1.5, 0.3, 0.15, (0.42, 0.52), 0.6),
}


class Island:
    """A process that is an island, as the parent sees it."""

    def __init__(self, settings: Settings, net: lab.Network | None, log: pathlib.Path) -> None:
        """Starts it, in the namespace of its number."""
        self.settings, self.net, self._log = settings, net, log
        self.killed_at: float | None = None
        self.start()

    def start(self) -> None:
        """Starts the process, again if it was killed."""
        argv = [sys.executable, "-m", "benchmarks.world.island", json.dumps(dataclasses.asdict(self.settings))]
        begin: Any = (
            subprocess.Popen if self.net is None else lambda a, **k: self.net.popen(self.settings.worker + 1, a, **k)
        )
        with open(self._log, "a") as log:
            self.process = begin(argv, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def kill(self) -> None:
        """Kills it without a word, and starts it again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.killed_at = time.monotonic()
        self.start()

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Returns what it has said of a kind."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["kind"] == kind]

    def wait(self, until: float) -> None:
        """Waits for its end."""
        if self.process.wait(max(1.0, until - time.monotonic())):
            raise SystemExit(f"{self.settings.name} failed:\n{self._log.read_text()[-3000:]}")

    def goodput(self, alone: float) -> tuple[float, float]:
        """Returns kept steps, and those of training alone in the time that it was there: so many a pace."""
        begun, (end,) = self.said("begun"), self.said("trained")
        there = end["at"] - max(begun[0]["at"], self.settings.start)
        if self.killed_at is not None:
            there -= begun[-1]["at"] - self.killed_at
        return end["step"] - self.settings.first, there / self.settings.pace * alone


@contextlib.contextmanager
def places(islands: int, shaped: bool) -> Iterator[lab.Network | None]:
    """Makes the namespaces: the first is the store's, whose own link is no limit."""
    if not shaped:
        yield None
        return
    with lab.Network(islands + 1, delay_s=1e-3) as net:
        for i in range(islands + 1):
            net.shape_worker(i, *(link(i - 1, islands) if i else (None, 0.0)))
        yield net


def link(island: int, islands: int) -> tuple[float, float]:
    """Returns bits a second and the round trip of an island's link, evenly from the fastest to the slowest."""
    share = island / max(1, islands - 1)
    rate, trip = ((1 - share) * a + share * b for a, b in zip(FASTEST, SLOWEST, strict=True))
    return rate, trip


class Server:
    """The S3 server, a process in the first namespace."""

    def __init__(self, net: lab.Network | None) -> None:
        """Starts it and waits until it answers."""
        address = "127.0.0.1" if net is None else net.address(0)
        self.options = bucket.options(f"http://{address}:{PORT}")
        argv = [sys.executable, "-m", "benchmarks.world.bucket", address, str(PORT)]
        begin: Any = subprocess.Popen if net is None else lambda a, **k: net.popen(0, a, **k)
        pipe = subprocess.PIPE
        self._process = begin(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1, cwd=ROOT)
        self._expect("ready")

    def copy(self, folder: pathlib.Path) -> None:
        """Copies what the bucket holds to a folder."""
        self._process.stdin.write(f"{folder}\n")
        self._expect("copied")

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def _expect(self, word: str) -> None:
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise SystemExit("the S3 server has ended: pip install -e '.[bench]'")


def run(plan: Plan, options: argparse.Namespace, islands: int, on: str, alone: float | None) -> dict[str, Any]:
    """Trains islands once; without ``alone``, steps a second of one, each trains for itself and that is what is returned."""
    import jax

    import gradcomp_jax as gc
    from benchmarks.adamw.task import MODELS, Task, judge, vocabulary
    from benchmarks.world import ledger
    from benchmarks.world.island import compressor

    steps = options.steps if alone else options.steps // 10
    length = steps * options.pace
    shaped = on == "bucket" and lab.available() is None
    with tempfile.TemporaryDirectory(prefix="islands-") as folder_name, places(islands, shaped) as net:
        folder = pathlib.Path(folder_name)
        server = Server(net) if on == "bucket" and alone else None
        store = folder / "store"
        start = time.monotonic() + options.start
        members = list[Island]()

        def begin(i: int) -> None:
            slow, late = plan.slow if i == 1 else 1.0, plan.late if i == islands - 1 else 0.0
            settings = Settings(
                name=NAMES[i],
                worker=i,
                folder=str(folder / NAMES[i]),
                steps=round(steps / slow),
                pace=options.pace * slow,
                place=("s3://bucket/run" if server else str(store)) if alone else "",
                options=server.options if server else {},
                every=options.every,
                grace=options.grace,
                patience=20.0,
                first=round(late * steps),
                start=start + late * length,
                text=options.text,
            )
            members.append(Island(settings, net, folder / f"{NAMES[i]}.txt"))

        def cut(number: int, seconds: float) -> None:
            if net:
                net.cut(number)
            time.sleep(seconds)
            if net:
                net.restore(number)

        happens = [(plan.late if i == islands - 1 else 0.0, functools.partial(begin, i)) for i in range(islands)]
        if plan.killed is not None:
            happens.append((plan.killed, lambda: members[0].kill()))
        if plan.apart is not None:
            first, last = plan.apart
            happens.append((first, lambda: cut(2, (last - first) * length)))
        if plan.away is not None:
            happens.append((plan.away, lambda: cut(0, plan.away_s)))
        try:
            for share, event in sorted(happens, key=lambda one: one[0]):
                if share:
                    time.sleep(max(0.0, start + share * length - time.monotonic()))
                event()
            for member in members:
                member.wait(start + 2 * length + CHECKED_S + options.start)
            if alone is None:
                rates = [m.said("step") for m in members]
                return {
                    "rate": sum((r[-1]["step"] - r[0]["step"]) / (r[-1]["at"] - r[0]["at"]) for r in rates) / islands
                }
            if server:
                server.copy(folder)
                (folder / "run").rename(store)
            sent = [net.sent_bytes(i + 1) for i in range(islands)] if net else None
        finally:
            for member in members:
                member.process.kill()
            if server:
                server.close()
        task = Task("65k", 1, text=options.text)
        params = MODELS[task.model].init(jax.random.key(0), vocabulary(task.text))
        codec = gc.islands.codec(compressor(), params)
        opened = gc.islands.store.open_store(store)
        centres, log = ledger.replay(opened, codec), gc.islands.history(opened)
        for member in members:
            for line in member.said("landed"):
                # The centre after every round is that which follows from the store alone, bit for bit.
                assert line["digest"] in (None, centres[line["round"]].digest), (member.settings.name, line)
        kept, could = map(sum, zip(*(m.goodput(alone * options.pace) for m in members), strict=True))
        ends = [m.said("end")[-1] for m in members]
        return {
            "rounds": len(log),
            "payloads": sum(len(decision.entries) for decision in log),
            "late": sum(end["island/late"] for end in ends),
            "delay": statistics.median(line["since"] for m in members for line in m.said("landed")),
            "kept": max(line["kept"] for m in members for line in m.said("landed")),
            "landed": sum(line["digest"] is not None for m in members for line in m.said("landed")),
            "law": max(max(ledger.errors(opened, codec, m.settings.name, folder / m.settings.name)) for m in members),
            "test": judge(task)(codec.tree(centres[-1].state.centre.copy()), "test"),
            "goodput": kept / could,
            "written": sum(end["island/bytes_written"] for end in ends),
            "read": sum(end["island/bytes_read"] for end in ends),
            "interfaces": sum(sent) if sent else None,
            "blocked": sum(end["island/blocked_seconds"] for end in ends) / (kept / alone),
        }


def baseline(options: argparse.Namespace, workers: int, every: int = 1, delay: int = 0) -> float:
    """Returns bits per character of synchronous AdamW, or of ``gc.diloco``, with the batches of so many islands."""
    from benchmarks.adamw import rows, train
    from benchmarks.adamw.task import Task

    row = rows.ROWS["dense"] if every == 1 else rows.outer(rows.INT4, every, *Settings.outer, delay=delay)
    one = train.Run(f"{every}-{delay}", Settings.rate, options.steps, 0)
    task = Task("65k", 1, workers=workers, text=options.text)
    with tempfile.TemporaryDirectory() as folder:
        return train.train(task, one, row, pathlib.Path(folder) / "saved", until=float("inf"))["test"]


HEADER = (
    "islands",
    "over",
    "what happens",
    "rounds",
    "payloads, refused",
    "delay, steps",
    "bits per character",
    "against `gc.diloco`",
    "as late",
    "goodput",
    "MB written, read",
    "MB sent by interfaces",
    "law, error",
)


def report(results: dict[str, Any]) -> str:
    """Returns the tables of the page."""
    lines = []
    for cell in results["cells"]:
        diloco = results["baselines"][str(cell["islands"])]["diloco"]
        lines.append(
            (
                cell["islands"],
                cell["on"],
                cell["plan"],
                cell["rounds"],
                f"{cell['payloads']}, {cell['late']:.0f}",
                f"{cell['delay']:.0f}",
                f"{cell['test']:.4f}",
                f"{cell['test'] / diloco - 1:+.2%}",
                f"{cell['test'] / cell['diloco'] - 1:+.2%}",
                f"{cell['goodput']:.1%}",
                f"{cell['written'] / 1e6:.1f}, {cell['read'] / 1e6:.1f}",
                f"{cell['interfaces'] / 1e6:.1f}" if cell["interfaces"] else "-",
                f"{cell['law']:.0e}",
            )
        )
    bases = [(n, f"{b['synchronous']:.4f}", f"{b['diloco']:.4f}") for n, b in results["baselines"].items()]
    return "\n".join(
        [
            *_markdown.table(HEADER, lines, align="rllrr"),
            "",
            *_markdown.table(("workers", "synchronous AdamW", "`gc.diloco`"), bases, align="r"),
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a trial of three islands and a few rounds: no result")
    add("--islands", type=int, nargs="+", default=[3, 5], help="how many, up to 5")
    add("--steps", type=int, default=4000, help="inner steps of each")
    add("--every", type=int, default=100, help="inner steps from one payload to the next")
    add("--pace", type=float, default=0.05, help="least seconds of a step")
    add("--grace", type=float, default=10.0, help="seconds that a round waits for islands that live")
    add("--start", type=float, default=30.0, help="seconds for processes to start")
    add("--text", default="enwik8", help="the data set; standard-library needs no download")
    add("--json", type=pathlib.Path, help="where the results are kept; a cell that is there is not run again")
    add("--write", type=pathlib.Path, metavar="PAGE", help="a Markdown page with the marker islands")
    options = parser.parse_args()
    if options.quick:
        options.islands, options.steps = [3], 600
    return options


def main() -> None:
    options = arguments()
    if (missing := lab.available()) is not None:
        print(f"Links cannot be shaped here: {missing}\n")
    results: dict[str, Any] = {"baselines": {}, "cells": []}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    for islands in options.islands:
        if str(islands) not in results["baselines"]:
            of = {"synchronous": baseline(options, islands), "diloco": baseline(options, islands, options.every)}
            results["baselines"][str(islands)] = of
        for on, plan in (("folder", "nothing happens"), *(("bucket", plan) for plan in PLANS)):
            if any((c["islands"], c["on"], c["plan"]) == (islands, on, plan) for c in results["cells"]):
                continue
            alone = run(Plan(), options, islands, on, None)["rate"]
            cell = run(PLANS[plan], options, islands, on, alone)
            cell["diloco"] = baseline(options, islands, options.every, min(round(cell["delay"]), options.every - 1))
            results["cells"].append({"islands": islands, "on": on, "plan": plan, "alone": alone, **cell})
            print(json.dumps(results["cells"][-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    text = report(results)
    print(f"\n{text}")
    if options.write is not None:
        write_between(options.write, "islands", text)


if __name__ == "__main__":
    main()
