"""Registers dataclasses as nodes of JAX's trees and with ``flax.serialization``, whenever Flax is imported."""

import dataclasses
import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

_FLAX = "flax.serialization"

Class = TypeVar("Class", bound=type)

NODES: list[type] = []
"""All registered classes, in order."""


def node(cls: Class) -> Class:
    """Registers a frozen dataclass: its arrays are the node's children, its fields with ``static`` metadata the node's own.

    ``flax.serialization`` writes the children by name. What it reads gets the static fields of the target, as with Flax's own
    dataclasses. Importing this library does not import Flax, so a class is registered with Flax once Flax is imported.
    """
    NODES.append(jax.tree_util.register_dataclass(cls))
    if _FLAX in sys.modules:
        _tell_flax(cls)
    return cls


def _tell_flax(cls: type) -> None:
    from flax import serialization

    names = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]

    def to_state_dict(value: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(value, name)) for name in names}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        if set(state) != set(names):
            raise ValueError(
                f"{cls.__name__} has the fields {', '.join(names)}, and what was saved has {', '.join(sorted(state))}, at"
                f" {serialization.current_path()}: give from_bytes a state made by the chain that was saved"
            )
        read = {name: serialization.from_state_dict(getattr(target, name), state[name], name=name) for name in names}
        return dataclasses.replace(target, **read)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)


class _WhenFlaxComes(importlib.abc.MetaPathFinder):
    """Registers all nodes with Flax when it is imported, which may be after a loop has made a state."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != _FLAX or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            object.__setattr__(spec.loader, "exec_module", functools.partial(_run, spec.loader.exec_module))
        return spec


def _run(exec_module: Any, module: Any) -> None:
    exec_module(module)
    for cls in NODES:
        _tell_flax(cls)


if _FLAX not in sys.modules:
    sys.meta_path.insert(0, _WhenFlaxComes())
