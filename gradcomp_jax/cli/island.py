"""``gradcomp island``: takes part in a run of islands, follows one, or draws who took part."""

import contextlib
import functools
import pathlib
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from gradcomp_jax import compressors
from gradcomp_jax._checks import Range
from gradcomp_jax._errors import SettingError
from gradcomp_jax._process import Stopped, leaving, raise_if_stopped
from gradcomp_jax.cli import ranges, runs, units
from gradcomp_jax.cli.options import Training, with_training_options
from gradcomp_jax.cli.tables import tell, write_result
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.experiments import Problem, show
from gradcomp_jax.experiments.island import IslandTraining, Landed, append_metrics, read_metrics
from gradcomp_jax.experiments.settings import RANGES
from gradcomp_jax.islands import Follower, IslandError, StoreError, follow, history, join
from gradcomp_jax.islands.objects import NotOursError

_SHARED = ("task", "source", "batch", "learning_rate", "data_dir", "real_devices")
_ROUNDS = Range(1, 1_000_000_000)
_GRACE = Range(0.01, 86_400, whole=False)
_BITS = Range(2, 8)
_WEIGHT = Range(0.001, 1_000, whole=False)
_RATE = Range(0, 1_000, whole=False, open_below=True)
_PATIENCE, _LOOKS, _LONGEST_POLL = 6, 10, 1.0
"""As in the defaults of :func:`gradcomp_jax.islands.join`: times the grace window, looks at the store in it, and seconds."""
_OPTIONS = {
    r"\bsize \S+, not ": "--task",
    r"\bcode \S+, not ": "--task, --from or --bits",
    r"\blearning_rate \S+, not ": "--outer-rate",
    r"\bmomentum \S+, not ": "--outer-momentum",
    r"\bquorum \S+, not ": "--quorum",
    r"\b(grace|patience) \S+, not ": "--grace",
    "choose another name": "--name",
    "folder for records|folder of its records": "--folder",
}
"""By what :class:`~gradcomp_jax.islands.IslandError` says of a run."""


@functools.partial(with_training_options, names=_SHARED)
def island_command(
    training: Training,
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE",
            help="Where the run is: a folder that all islands see, or a bucket such as s3://bucket/run.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Take part under this name, which no other island of the run has.")
    ] = None,
    follows: Annotated[
        bool, typer.Option("--follow", help="Take no part: print how the centre does, round by round.")
    ] = False,
    picture: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Take no part: draw who took part in which round, as a PNG file."),
    ] = None,
    metrics: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="An island's own folder, whose losses and residuals go into the picture; may be said several times.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Folder on this machine's disk for what the island keeps, and for its metrics.jsonl; with it the same"
            " command goes on after a crash.",
            show_default="gradcomp-islands/NAME",
        ),
    ] = None,
    rounds: Annotated[int, ranges.number(_ROUNDS, "Ends when the run has had so many rounds.")] = 30,
    every: Annotated[int, ranges.number(RANGES["every"], "Steps from one payload to the next, at least.")] = 20,
    bits: Annotated[int, ranges.number(_BITS, "Bits of a value in payloads: 8, 4 or 2. All islands say the same.")] = 4,
    outer_rate: Annotated[
        float, ranges.number(_RATE, "Learning rate of the outer step. All islands say the same.")
    ] = 0.7,
    outer_momentum: Annotated[
        float, ranges.number(RANGES["momentum"], "Nesterov momentum of the outer step. All islands say the same.")
    ] = 0.5,
    quorum: Annotated[
        int, ranges.number(ranges.PROCESSES, "Payloads that a round needs. All islands say the same.")
    ] = 1,
    grace: Annotated[
        float,
        ranges.number(
            _GRACE,
            "Seconds that a round waits for living islands; one without a heartbeat for 6 times as long is not waited for."
            " All islands say the same.",
        ),
    ] = 2.0,
    weight: Annotated[
        float,
        ranges.number(_WEIGHT, "What this island counts for in a round, such as its batch over that of the others."),
    ] = 1.0,
    workers: Annotated[int, ranges.number(RANGES["workers"], "Devices of this island, which share every batch.")] = 1,
    seed: Annotated[
        int | None,
        ranges.number(
            ranges.SEED, "Of the order of the examples, and of the first centre.", show_default="of the name"
        ),
    ] = None,
) -> None:
    """Train one island of a run, whose islands exchange outer gradients over a folder or a bucket.

    Every island trains what gradcomp train trains, alone, with examples in an order of its own. A line is printed for
    each round. ^C ends it in order: the same command goes on.
    """
    console = Console()
    with user_errors(), _remedies():
        if sum((name is not None, follows, picture is not None)) != 1:
            raise SettingError("say one of --name NAME, to take part, --follow, and --picture FILE")
        if metrics and picture is None:
            raise SettingError("--metrics needs --picture")
        if picture is not None:
            _draw(console, place, picture, metrics or [])
            return
        try:
            code = compressors.block_quantized(bits=bits)
        except ValueError as error:
            raise SettingError(f"--bits must be 8, 4 or 2, got {bits}") from error
        problem, settings = runs.prepare(training, workers)
        if name is None:
            _follow(console, place, problem, code, rounds)
            return
        own = pathlib.Path("gradcomp-islands", name) if folder is None else folder
        one = IslandTraining(problem, settings, zlib.crc32(name.encode()) if seed is None else seed)
        member = join(
            place,
            one.state.params,
            name=name,
            folder=own,
            compressor=code,
            every=every,
            weight=weight,
            learning_rate=outer_rate,
            momentum=outer_momentum,
            quorum=quorum,
            grace=grace,
            patience=_PATIENCE * grace,
            poll=min(grace / _LOOKS, _LONGEST_POLL),
        )
        shown = _Shown(console, name, place, own)
        with _stoppable(shown.stopped), contextlib.ExitStack() as stack:
            with _readable(own):
                stack.enter_context(member)
            try:
                for landed in one.rounds(member, name, rounds, raise_if_stopped):
                    shown.round(landed)
                # Without a step of this process there is nothing to send that the others wait for.
                all_sent = shown.steps == 0 or member.close(one.state.params)
            except Stopped:
                # Steps since the last departure go into the record; nothing is waited for.
                member.close(one.state.params, timeout=0.0)
                raise
        shown.end(
            all_sent,
            member.diagnostics(),
            one.problem,
            one.state.params,
            follow(place, one.problem.init(0), compressor=code),
        )


class _Shown:
    """Prints what happens to an island."""

    def __init__(self, console: Console, name: str, place: str, folder: pathlib.Path) -> None:
        """Takes what the sentences say; ``steps`` is how many this process has made until the last round."""
        self._console, self._name, self._place, self._folder = console, name, place, folder
        self._last: Landed | None = None
        self.steps = 0
        self._writes = True

    def stopped(self) -> str:
        """Returns the sentence on where the island was stopped, and how it continues."""
        where = f"after round {self._last.round}" if self._last else "before it had a centre"
        return f"stopped {where}: the same command goes on with what is in {self._folder}"

    def round(self, landed: Landed) -> None:
        """Prints a line, and adds one to the metrics; the first is only where the island begins."""
        before, self._last, self.steps = self._last, landed, landed.steps
        if before is None:
            print(f"{self._name} joins {self._place} after round {landed.round}", file=sys.stderr, flush=True)
            self._line("round", "payload", "loss", "written", "read", "hidden")
            return
        self._line(
            str(landed.round),
            "late" if landed.late > before.late else "accepted" if landed.accepted > before.accepted else "none",
            "-" if landed.loss is None else f"{landed.loss:.4g}",
            units.show_bytes(landed.bytes_written),
            units.show_bytes(landed.bytes_read),
            units.show_seconds(landed.hidden_seconds),
        )
        if not self._writes:
            return
        try:
            append_metrics(self._folder, landed)
        except OSError as error:
            self._writes = False
            sentence = f"cannot write metrics in {self._folder}: {error.strerror}; the run goes on without"
            print(f"gradcomp: {sentence}", file=sys.stderr, flush=True)

    @staticmethod
    def _line(number: str, payload: str, *rest: str) -> None:
        print(f"{number:>7}  {payload:<8}", *(f"{cell:>9}" for cell in rest), flush=True)

    def end(
        self,
        all_sent: bool,
        counts: Mapping[str, float],
        problem: Problem,
        params: Any,
        follower: Follower,
    ) -> None:
        """Prints what came out."""
        said = f"{int(counts['island/accepted'])} accepted, {int(counts['island/late'])} late"
        tell(self._console, f"{self._name}: {said}{_judged(problem, params, '; its parameters: ')}")
        if not all_sent:
            tell(
                self._console,
                f"its last steps were not accepted: {self._folder} has them, and they go out with more --rounds",
            )
        try:
            number, centre = follower.update()
        except StoreError as error:
            tell(self._console, f"the centre cannot be read now: {error}")
        else:
            tell(self._console, f"centre after round {number}{_judged(problem, centre)}")


def _judged(problem: Problem, params: Any, joint: str = ": ") -> str:
    if problem.evaluate is None:
        return ""
    return f"{joint}{problem.metric} {show(problem.metric, problem.evaluate(jax.device_get(params)))}"


@contextlib.contextmanager
def _stoppable(said: Callable[[], str]) -> Iterator[None]:
    """Lets a signal end the block, with a sentence on stderr."""
    with leaving(said):
        try:
            yield
        except Stopped:
            print(said(), file=sys.stderr, flush=True)
            raise


@contextlib.contextmanager
def _remedies() -> Iterator[None]:
    """Makes one sentence of what islands and stores say, with the options that it is about."""
    try:
        yield
    except IslandError as error:
        names = [option for said, option in _OPTIONS.items() if re.search(said, str(error))]
        where = f" ({', '.join(names)})" if names else ""
        raise SettingError(f"{error}{where}") from error
    except (StoreError, ImportError) as error:
        raise SettingError(str(error)) from error


@contextlib.contextmanager
def _readable(folder: pathlib.Path) -> Iterator[None]:
    """Makes one sentence of a folder of an island that is none."""
    try:
        yield
    except NotOursError as error:
        raise SettingError(f"{folder}: {error}: name another --folder and another --name") from error
    except OSError as error:
        raise SettingError(f"cannot write in {folder}: {error.strerror}: name another with --folder") from error


def _follow(console: Console, place: str, problem: Problem, code: Any, rounds: int) -> None:
    number, told = -1, ""
    follower = follow(place, problem.init(0), compressor=code)
    with _stoppable(lambda: f"stopped after round {max(number, 0)}"):
        while number < rounds:
            try:
                found, centre = follower.update()
            except StoreError as error:
                if str(error) != told:
                    told = str(error)
                    print(f"waits: {told}", file=sys.stderr, flush=True)
            else:
                if found > number:
                    number = found
                    tell(console, f"round {number}{_judged(problem, centre)}")
            end = time.monotonic() + 0.5
            while time.monotonic() < end and number < rounds:
                raise_if_stopped()
                time.sleep(0.05)


def _draw(console: Console, place: str, picture: pathlib.Path, metrics: list[pathlib.Path]) -> None:
    from gradcomp_jax.cli.island_plot import picture_of

    decisions = history(place)
    if not decisions:
        raise SettingError(f"{place} has had no round yet: draw it later")
    landed = [line for path in metrics for line in read_metrics(path)]
    write_result(console, picture, picture_of(decisions, landed, pathlib.PurePath(place).name), follow=True)
