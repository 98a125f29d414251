"""``gradcomp plan``: should I compress, with what, and what will it give?"""

import json
import pathlib
import sys
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from gradcomp_jax._checks import Range
from gradcomp_jax._errors import SettingError, known_name, look_up, users_code
from gradcomp_jax._files import read_json, write_whole
from gradcomp_jax.cli import plan_report, ranges, units
from gradcomp_jax.cli.own_code import imported
from gradcomp_jax.cli.tables import print_table, tell
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.methods import METHODS
from gradcomp_jax.planning import MODELS, Calibration, Cluster, Device, Link, Workload
from gradcomp_jax.planning import prices as known_prices
from gradcomp_jax.planning.outlook import Outlook, outlook

_WIDTH = 1024


def plan_command(
    params: Annotated[str | None, typer.Option(help="Parameters: 25.6M, taken to be matrices of 1024 x 1024.")] = None,
    model: Annotated[str | None, typer.Option(help=f"In their place a model's shapes: {', '.join(MODELS)}.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODULE:NAME",
            help="Or your own: a tree of parameters, a function that makes one, or the function that train --from takes.",
        ),
    ] = None,
    step_time: Annotated[str, typer.Option(help="Of one worker without an exchange: 180ms.")] = "100ms",
    workers: Annotated[int, typer.Option(help="Devices in all."), ranges.PLANNED] = 8,
    per_node: Annotated[int, typer.Option(help="Devices of a node."), ranges.PLANNED] = 1,
    link: Annotated[str, typer.Option(help="Rate of each node's link: 10Gbit, 1.25GB/s.")] = "10Gbit",
    latency: Annotated[str, typer.Option(help="Of that link, one way: 50us.")] = "50us",
    inner_link: Annotated[str, typer.Option(help="Rate of each device's link within its node.")] = "200GB/s",
    inner_latency: Annotated[str, typer.Option(help="Of that link.")] = "5us",
    topology: Annotated[str, typer.Option(help="Of the nodes: switch or ring.")] = "switch",
    overlap: Annotated[
        float,
        typer.Option(help="Share of the step time in which an exchange may run beside it."),
        Range(0, 1, whole=False),
    ] = 0.0,
    memory_rate: Annotated[
        str, typer.Option(help="Bytes a second that a device reads and writes: compression takes as many copies.")
    ] = "1TB/s",
    methods: Annotated[str, typer.Option(help="Names with commas between; all by default.")] = "all",
    calibration: Annotated[
        pathlib.Path | None,
        typer.Option(help="A file of gc.calibrate(mesh).save(path), in place of the link and the memory's rate."),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            help='A file: how many times dense\'s steps a method needs, such as {"dgc": 1.2}; none for seconds alone.'
            " By default what the package's own runs gave."
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Folder for a picture and JSON; neither is made without it.")
    ] = None,
) -> None:
    """Predict a step with every method, and say whether to compress. Nothing is run: the figures are modelled."""
    what = model or source or f"{params} parameters"
    with user_errors():
        known = _calibration(calibration)
        weighed = _prices(prices)
        device = None if known and known.device else Device(units.rate("--memory-rate", memory_rate))
        try:
            outer = Link(units.rate("--link", link), units.seconds("--latency", latency))
            inner = Link(units.rate("--inner-link", inner_link), units.seconds("--inner-latency", inner_latency))
            cluster = Cluster(workers, outer, per_node, inner if per_node > 1 else None, topology)  # type: ignore[arg-type]
            compute = units.seconds("--step-time", step_time)
            workload = Workload.of(_shapes(params, model, source), compute, overlap=overlap)
            asked = _names(methods)
            found = outlook(workload, cluster, methods=asked, device=device, calibration=known, prices=weighed)
        except ValueError as error:
            # The planner names values and remedies as the experiments do.
            raise SettingError(str(error)) from error
        console = Console()
        tell(console, plan_report.title(found, what), "bold")
        console.print()
        print_table(console, plan_report.table(found), "--out FOLDER writes all to plan.json")
        console.print()
        tell(console, plan_report.sentence(found), "bold")
        for note in plan_report.notes(found, known, matrices=params is not None, prices_off=weighed == {}):
            tell(console, note, "dim")
        for path in [] if out is None else _write(found, out, what):
            tell(console, f"wrote {path}")
        if out is not None and not found.has_curves:
            why = "knows one rate and one number of workers" if known else "has no speed-up"
            tell(console, f"no picture: {'a calibration' if known else 'a step that computes nothing'} {why}")


def _shapes(params: str | None, model: str | None, source: str | None) -> Any:
    given = [option for option, value in (("--params", params), ("--model", model), ("--from", source)) if value]
    if len(given) != 1:
        said = f", got {' and '.join(given)}" if given else ""
        raise SettingError(f"say what is trained with one of --params, --model and --from{said}")
    if model is not None:
        return look_up("model", model, MODELS)()
    if source is not None:
        return _imported(source)
    assert params is not None
    count = units.count("--params", params)
    whole, rest = divmod(count, _WIDTH * _WIDTH)
    shapes: list[tuple[int, ...]] = [(_WIDTH, _WIDTH)] * whole
    if rest >= _WIDTH:
        shapes.append((rest // _WIDTH, _WIDTH))
    if rest % _WIDTH:
        shapes.append((rest % _WIDTH,))
    return [jax.ShapeDtypeStruct(shape, jax.numpy.float32) for shape in shapes]


def _imported(source: str) -> Any:
    """The parameters, or their shapes, that ``module:name`` is or makes; of a function only the shapes are found out."""
    found = imported(source)
    if callable(found):
        # Imported here, because a plan without --from needs nothing that trains.
        from gradcomp_jax.experiments.own_task import is_task

        file = getattr(sys.modules.get(found.__module__), "__file__", None)
        with users_code(f"--from {source}", file):
            found = jax.eval_shape(lambda: made[1] if is_task(made := found()) else made)
    if not jax.tree.leaves(found) or not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(found)):
        raise SettingError(f"--from {source} must be a tree of arrays or of their shapes, or a function that makes one")
    return found


def _names(methods: str) -> list[str] | None:
    words = [word.strip() for word in methods.split(",") if word.strip()]
    return None if words == ["all"] else [known_name("method", word, METHODS) for word in words]


def _calibration(path: pathlib.Path | None) -> Calibration | None:
    if path is None:
        return None
    try:
        return Calibration.load(path)
    except (OSError, ValueError) as error:
        raise _cannot_read(path, error) from error


def _prices(given: str | None) -> known_prices.Prices | None:
    if given is None or given == "none":
        return None if given is None else {}
    try:
        read = known_prices.from_dict(read_json(given))
    except (OSError, ValueError) as error:
        raise _cannot_read(given, error) from error
    return {known_name("method", name, METHODS): price for name, price in read.items()}


def _cannot_read(path: str | pathlib.Path, error: OSError | ValueError) -> SettingError:
    return SettingError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


def _write(found: Outlook, out: pathlib.Path, what: str) -> list[pathlib.Path]:
    from gradcomp_jax.cli.plan_plot import picture_of

    picture, figures = out / "plan.png", out / "plan.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(figures, json.dumps(found.to_dict(), indent=1) + "\n", follow=False)
        if not found.has_curves:
            return [figures]
        write_whole(picture, picture_of(found, what), follow=False)
    except OSError as error:
        raise SettingError(f"cannot write the results that are printed above: {error}") from error
    return [picture, figures]
