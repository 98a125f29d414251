"""Gradient compression for JAX, as plain optax transformations."""

import importlib as _importlib
import importlib.util as _util
import sys as _sys
import typing as _typing

if _typing.TYPE_CHECKING:
    from gradcomp_jax._public import *  # noqa: F403

__version__ = "0.1.0rc1"


def __getattr__(name: str) -> _typing.Any:
    """Imports the public names when one is first used, so that the command can start before JAX is imported."""
    if name == "__all__":
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _util.find_spec(f"{__name__}.{name}") is not None:
        return _importlib.import_module(f"{__name__}.{name}")
    value = getattr(_importlib.import_module(f"{__name__}._public"), name, None)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=_sys.modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names."""
    return [name for name in vars(_importlib.import_module(f"{__name__}._public")) if not name.startswith("_")]
