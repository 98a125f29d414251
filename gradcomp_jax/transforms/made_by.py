"""What made an exchange's state, in words that a checkpoint can keep and compare."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

_UNSAID = ("axis_name",)
"""Options that say nothing about a state: another program may call the same axis otherwise."""


_LONGEST = 200
"""Characters of a tree of options."""


@dataclasses.dataclass(frozen=True)
class MadeBy:
    """The method that made a state, and its options: static, hashable, and the same in every process.

    Attributes:
        name: of the method, or ``exchange``; empty where it is not known.
        options: every option and its value as text, defaults included, in the order of the signature.
    """

    name: str = ""
    options: tuple[tuple[str, str], ...] = ()


def made_by(name: str, options: Mapping[str, Any]) -> MadeBy:
    """Returns what a method was called, and its options as text; those of static objects (compressors) one by one."""
    said: list[tuple[str, str]] = []
    for option, value in options.items():
        if option not in _UNSAID:
            said += _lines(option, value)
    return MadeBy(name, tuple(said))


def _lines(option: str, value: Any) -> list[tuple[str, str]]:
    """An option, and where its value is a static object the fields of that after it: ``compressor.k``."""
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
    """Returns a text that is not too long to be read: else its beginning, and what tells it from others."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"


def _text(option: str, value: Any) -> str:
    """A value as text that does not depend on the process: no addresses, no values of arrays."""
    if option.rpartition(".")[2] in ("dtype", "memory_dtype") and value is not None:
        return str(jnp.dtype(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list, PartitionSpec)):
        return _short(f"({', '.join(_text(option, v) for v in value)})")
    if isinstance(value, Mapping):
        # Which leaf a memory is of depends on such trees, of masks and of specs.
        return _short(f"{{{', '.join(f'{key}: {_text(option, v)}' for key, v in value.items())}}}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return " ".join(f"{name}={text}" for name, text in _lines(type(value).__name__, value))
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return type(value).__name__ if not hasattr(value, "dtype") else "an array"
