"""The method that made an exchange's state, as text that a checkpoint can keep and compare."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

_UNSAID = ("axis_name",)
"""Options that say nothing about a state: another program may give the same axis another name."""


_LONGEST = 200
"""Most characters of a tree of options."""


@dataclasses.dataclass(frozen=True)
class MadeBy:
    """Names the method that made a state, and its options: static, hashable, and the same in every process.

    Attributes:
        name: name of the method, or ``exchange``; empty where it is not known.
        options: every option and its value as text, defaults included, in the order of the signature.
    """

    name: str = ""
    options: tuple[tuple[str, str], ...] = ()


def made_by(name: str, options: Mapping[str, Any]) -> MadeBy:
    """Returns a method's name, and its options as text; the fields of static objects (compressors) one by one."""
    said: list[tuple[str, str]] = []
    for option, value in options.items():
        if option not in _UNSAID:
            said += _lines(option, value)
    return MadeBy(name, tuple(said))


def _lines(option: str, value: Any) -> list[tuple[str, str]]:
    """Returns an option as text; where its value is a static object, also that object's fields: ``compressor.k``."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return [(option, _text(option, value))]
    inside = [
        line
        for field in dataclasses.fields(value)
        if field.compare
        for line in _lines(f"{option}.{field.name}", getattr(value, field.name))
    ]
    return [(option, type(value).__name__), *inside]


def _short(text: str) -> str:
    """Returns a short text as it is; of a long one the beginning, and a digest that tells it from others."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"


def _text(option: str, value: Any) -> str:
    """Returns a value as text that does not depend on the process: without addresses and values of arrays."""
    if option.rpartition(".")[2] in ("dtype", "memory_dtype") and value is not None:
        return str(jnp.dtype(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list, PartitionSpec)):
        return _short(f"({', '.join(_text(option, v) for v in value)})")
    if isinstance(value, Mapping):
        # Trees of masks and specs decide which leaf a memory belongs to.
        return _short(f"{{{', '.join(f'{key}: {_text(option, v)}' for key, v in value.items())}}}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return " ".join(f"{name}={text}" for name, text in _lines(type(value).__name__, value))
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return type(value).__name__ if not hasattr(value, "dtype") else "an array"
