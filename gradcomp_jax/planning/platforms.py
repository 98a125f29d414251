"""How long the devices of a platform encode, reduce and decode: what the planner takes where nothing was measured."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

DATA = pathlib.Path(__file__).with_name("platforms.json")
"""The figures, as ``benchmarks/platforms.py`` writes them."""
ALL_REDUCED = "dense_bf16, one all-reduce"
"""Has figures of its own, because dense bfloat16 takes two phases by default."""
_ASSUMED = {"cpu": "cpu", "gpu": "h100", "tpu": "v5p"}


class Figures(NamedTuple):
    """What a method's arithmetic costs a worker in a step.

    Attributes:
        ps: picoseconds a value, those of launches left out.
        launches: kernels for each tensor.
        beside: kernels for all tensors together.
    """

    ps: float
    launches: float
    beside: float


@dataclasses.dataclass(frozen=True)
class Platform:
    """Holds the figures of one kind of device.

    Attributes:
        name: for instance ``v5e``.
        kinds: beginnings of what JAX calls such a device.
        memory_rate: bytes a second that a device reads and writes.
        launch: seconds to start a kernel.
        how: ``measured``, ``compiled``, or ``estimated``.
        source: what was measured, compiled or estimated, and with which versions.
        methods: figures by method.
    """

    name: str
    kinds: tuple[str, ...]
    memory_rate: float
    launch: float
    how: str
    source: str
    methods: Mapping[str, Figures]

    def seconds(self, method: str, values: float, tensors: int) -> float:
        """Returns the seconds that a worker takes for a method, the owner's part of it included."""
        figures = self.methods[method]
        return 1e-12 * figures.ps * values + (figures.launches * tensors + figures.beside) * self.launch


def _read(name: str, kept: Mapping[str, Any], every: Mapping[str, Any]) -> Platform:
    rate, like = kept["memory_rate"], every[kept.get("like", name)]
    scale = like["memory_rate"] / rate
    methods = {method: Figures(scale * ps, *launches) for method, (ps, *launches) in like["methods"].items()}
    source = like["source"] if like is kept else f"as {kept['like']}, at the rate of its memory; {like['source']}"
    return Platform(name, tuple(kept["kinds"]), rate, like["launch"], like["how"], source, methods)


def load() -> dict[str, Platform]:
    """Reads the figures of the package."""
    every = json.loads(DATA.read_text(encoding="utf-8"))
    return {name: _read(name, kept, every) for name, kept in every.items()}


PLATFORMS = load()
"""The platforms by name; ``docs/planner.md`` has their figures."""


@functools.cache
def here() -> tuple[str, str]:
    """Returns the name of the platform of the devices that JAX finds, and why it is this one."""
    try:
        device = jax.devices()[0]
    except RuntimeError:  # Another process may hold them.
        return "cpu", "assumed, because JAX finds no device"
    kinds = {kind: name for name, one in PLATFORMS.items() for kind in one.kinds if device.device_kind.startswith(kind)}
    if kinds:
        return kinds[max(kinds, key=len)], "which JAX finds here"
    assumed = _ASSUMED.get(device.platform, "cpu")
    return assumed, f"assumed, because nothing is known of {device.device_kind}, which JAX finds here"
