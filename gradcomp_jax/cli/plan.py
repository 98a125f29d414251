"""``gradcomp plan``: should I compress, with what, and what will it give?"""

import contextlib
import functools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from gradcomp_jax._checks import Range
from gradcomp_jax._errors import SettingError, known_name, look_up, users_code
from gradcomp_jax._files import read_json
from gradcomp_jax.cli import plan_figures, plan_report, ranges, units
from gradcomp_jax.cli.own_code import imported
from gradcomp_jax.cli.tables import print_table, tell, write_result
from gradcomp_jax.cli.user_errors import user_errors
from gradcomp_jax.methods import METHODS
from gradcomp_jax.planning import CLUSTERS, MODELS, PLATFORMS, Calibration, Cluster, Device, Link, Workload
from gradcomp_jax.planning import prices as known_prices
from gradcomp_jax.planning.outlook import outlook
from gradcomp_jax.planning.presets import Preset
from gradcomp_jax.planning.task import OPTIMIZERS, TASKS

_WIDTH = 1024
_INNER = Link(200e9, 5e-6)
_DEFAULT = Preset(Cluster(8, Link.of_bits(10e9, 50e-6)), memory=0.0, platform="cpu")
"""Where no cluster is named; of its devices nothing is known."""
_NARROW, _WIDEST = 80, 100
"""Columns of the short form: for a file or a pipe, and at most on a terminal."""


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
    task: Annotated[
        str | None,
        typer.Option(
            help=f"Kind of model, for the steps that methods need: {', '.join(TASKS)}.",
            show_default="as the tensors' names and shapes say",
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help=f"That follows the exchange: {', '.join(OPTIMIZERS)}.", show_default="any")
    ] = None,
    step_time: Annotated[str, typer.Option(help="Of one worker without an exchange: 180ms.")] = "100ms",
    cluster: Annotated[
        str | None,
        typer.Option(help=f"Nodes, links and devices by name: {', '.join(CLUSTERS)}; the options below change it."),
    ] = None,
    workers: Annotated[
        int | None, ranges.number(ranges.PLANNED, "Devices in all.", show_default="8, or the cluster's")
    ] = None,
    per_node: Annotated[
        int | None, ranges.number(ranges.PLANNED, "Devices of a node.", show_default="1, or the cluster's")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Rate at which a node sends to others: 10Gbit, 1.25GB/s. Of a TPU slice the network cards of all its hosts"
            " together.",
            show_default="10Gbit, or the cluster's",
        ),
    ] = None,
    latency: Annotated[str | None, typer.Option(help="Of that link, one way: 50us.", show_default="50us")] = None,
    inner_link: Annotated[
        str | None,
        typer.Option(help="Rate of each device's link within its node.", show_default="200GB/s, or the cluster's"),
    ] = None,
    inner_latency: Annotated[str | None, typer.Option(help="Of that link.", show_default="5us")] = None,
    topology: Annotated[str, typer.Option(help="Of the nodes: switch or ring.")] = "switch",
    overlap: Annotated[
        float | None,
        ranges.number(
            Range(0, 1, whole=False),
            "Share of the step time in which an exchange may run beside it.",
            show_default="both 0 and 2/3",
        ),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(
            help=f"Devices that compress: {', '.join(PLATFORMS)}.", show_default="the cluster's, or what JAX finds here"
        ),
    ] = None,
    memory_rate: Annotated[
        str | None,
        typer.Option(
            help="Bytes a second that a device reads and writes: compression takes longer where they are fewer.",
            show_default="the platform's",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Of a device, 80GB: methods whose state does not fit are left out.", show_default="the cluster's"
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help="Names with commas between; all by default.")] = "all",
    calibration: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="A file of gc.calibrate(mesh).save(path), in place of the link, and of the platform's figures."
        ),
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
    everything: Annotated[bool, typer.Option("--all", help="Print all methods, columns and notes.")] = False,
) -> None:
    """Predict a step with every method, and say whether to compress. Nothing is run: the figures are modelled."""
    what = model or source or f"{params} parameters"
    with user_errors():
        with _reading(calibration):
            known = None if calibration is None else Calibration.load(calibration)
        weighed = _prices(prices)
        preset = None if cluster is None else look_up("cluster", cluster, CLUSTERS)
        rate = None if memory_rate is None else units.rate("--memory-rate", memory_rate)
        named = None if platform is None else known_name("platform", platform, PLATFORMS)
        device = Device(rate, platform=named or (preset.platform if preset else None))
        memory = units.size("--device-memory", device_memory) if device_memory else preset.memory if preset else None
        try:
            own = (preset or _DEFAULT).cluster
            outer = _link(own.outer, "", link, latency)
            inner = _link(own.inner or _INNER, "inner-", inner_link, inner_latency)
            per_node = per_node or own.per_node
            nodes = Cluster(workers or own.workers, outer, per_node, inner if per_node > 1 else None, topology)  # type: ignore[arg-type]
            compute = units.seconds("--step-time", step_time)
            workload = Workload.of(_shapes(params, model, source), compute, overlap=overlap or 0.0)
            found = outlook(
                workload,
                nodes,
                methods=_names(methods),
                device=None if known and known.device else device,
                calibration=known,
                prices=weighed,
                task=task,
                optimizer=optimizer,
                device_memory=memory,
                overlapped=overlap is None,
            )
        except ValueError as error:
            # The planner names values and remedies as the experiments do.
            raise SettingError(str(error)) from error
        console, off = Console(), weighed == {}
        if everything:
            table, notes = plan_report.table(found), plan_report.notes(found, known, params is not None, prices_off=off)
        else:
            table, notes = plan_report.short(found), plan_report.short_notes(found, known, prices_off=off)
            console.width = min(console.width, _WIDEST) if console.is_terminal else _NARROW
        told = functools.partial(tell, console, wrapped=not everything)
        verdict, *more = plan_report.sentences(found)
        told(verdict, "bold")
        for one in more:
            told(one)
        console.print()
        told(plan_report.title(found, what))
        console.print()
        print_table(console, table, "--out FOLDER writes all to plan.json")
        console.print()
        for note in notes:
            told(note, "dim")
        if out is not None:
            write_result(console, out / "plan.json", json.dumps(plan_figures.to_dict(found), indent=1) + "\n")
            if found.has_curves:
                from gradcomp_jax.cli.plan_plot import picture_of

                write_result(console, out / "plan.png", picture_of(found, what))
            else:
                why = "knows one rate and one number of workers" if known else "has no speed-up"
                tell(console, f"no picture: {'a calibration' if known else 'a step that computes nothing'} {why}")


def _link(own: Link, where: str, link: str | None, latency: str | None) -> Link:
    """Returns a link of a cluster with what was said instead of its own."""
    return Link(
        own.rate if link is None else units.rate(f"--{where}link", link),
        own.latency if latency is None else units.seconds(f"--{where}latency", latency),
    )


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
    """Returns the parameters, or their shapes, that ``module:name`` is or makes; of a function only the shapes."""
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


def _prices(given: str | None) -> known_prices.Prices | None:
    if given is None or given == "none":
        return None if given is None else {}
    with _reading(given):
        read = known_prices.from_dict(read_json(given))
    return {known_name("method", name, METHODS): price for name, price in read.items()}


@contextlib.contextmanager
def _reading(path: str | pathlib.Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
