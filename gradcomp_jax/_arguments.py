"""Checks arguments of public functions: an error names the argument, says what it must be, and gives an example."""

import collections.abc
import difflib
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

EXAMPLES = {
    "axis_name": "'data'",
    "inner_axis_name": "'devices'",
    "mesh": "jax.make_mesh((8,), ('data',))",
    "layers": r"('embed', r'layers_\d+', 'head')",
    "densities": "(0.01, 0.001)",
    "every": "100",
    "delay": "1",
    "warm_up": "gradcomp_jax.warm_up(100)",
    "warm_up_steps": "100",
    "rank": "4",
    "shape": "(64, 32)",
    "rules": "{0: 'dense', 2**14: gradcomp_jax.compressors.topk(0.01)}",
    "rule": "gradcomp_jax.compressors.topk(0.01)",
    "tx": "optax.chain(gradcomp_jax.dgc(axis_name='data'), optax.sgd(0.1))",
}
"""Example values of arguments, by name, as a user would write them."""

_KINDS = {
    "Compressor": ("a compressor", "gradcomp_jax.compressors.topk(0.01)"),
    "Policy": ("a policy", "gradcomp_jax.by_path('embed', gradcomp_jax.compressors.topk(0.01), otherwise='dense')"),
    "Memory": ("a memory", "gradcomp_jax.memory.residual()"),
    "Collective": ("a collective", "'two_phase'"),
    "GradientTransformation": ("a gradient transformation", "gradcomp_jax.dgc(axis_name='data')"),
    "Mesh": ("a mesh", EXAMPLES["mesh"]),
    "Mapping": ("a mapping", "{'blocks/': 1}"),
    "Array": ("an array", ""),
    "str": ("a string", ""),
    "NoneType": ("None", ""),
    **dict.fromkeys(("tuple", "Sequence", "Iterable"), ("a tuple", "")),
    "Callable": ("a function", ""),
}
"""Types, by name: how an error calls a value of one, and an example."""

_FUNCTIONS: tuple[Any, ...] = (collections.abc.Callable,)

_SAID_BETTER = ("matrix", "rate", "stacked", "memory_dtype")
"""Arguments whose functions give a better error, such as one that says what a pattern maps to."""


def checked(function: Function) -> Function:
    """Makes a public function name the remedy for arguments that it cannot take; its signature does not change.

    Arrays pass, because ``optax.inject_hyperparams`` gives them: the function itself says what must be static.

    Raises:
        TypeError: when called, for an argument that is missing, unknown, or positional where it must be named; and for a value
            that does not fit an annotation of numbers, strings, functions or our own classes.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        given = bound(function, signature, args, options)
        return function(*given.args, **given.kwargs)

    return cast(Function, wrapper)


def bound(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], options: dict[str, Any]
) -> inspect.BoundArguments:
    """Returns the arguments of one call, with NumPy scalars as Python numbers, and refuses what :func:`checked` refuses."""
    try:
        given = signature.bind(*args, **options)
    except TypeError as error:
        raise TypeError(_unbound(public_name(function), signature.parameters, args, options, str(error))) from None
    # Memories themselves say which dtypes they can have.
    said_better = (*_SAID_BETTER, "dtype") if ".memory." in function.__module__ else _SAID_BETTER
    for name, value in given.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            _check(name, value, parameter, said_better)
            if isinstance(value, np.generic) and {int, float, bool} & set(_types(parameter.annotation)):
                given.arguments[name] = value.item()
    return given


def public_name(function: Callable[..., Any]) -> str:
    """Returns a function's name as users write it."""
    parts = function.__module__.split(".")
    folder = next((part for part in ("compressors", "memory", "collectives", "masks") if part in parts), "")
    return ".".join(filter(None, (parts[0], folder, function.__name__)))


def refuse_axis(name: str, value: Any) -> None:
    """Refuses a value that cannot be the name of an axis or a tuple of names."""
    if isinstance(value, list) and value:
        remedy = repr(value[0] if len(value) == 1 else tuple(value))
    elif hasattr(value, "axis_names") and value.axis_names:
        remedy = repr(value.axis_names[0])
    else:
        remedy = EXAMPLES["axis_name"]
    parts = value if isinstance(value, tuple) else (value,)
    if isinstance(value, collections.abc.Hashable) and not any(map(_is_no_name, parts)):
        return
    raise TypeError(
        f"{name} must be the name of an axis, a string, or a tuple of names, got {said(value)}: write {name}={remedy}"
    )


def _is_no_name(value: Any) -> bool:
    wrong = (numbers.Number, list, dict, set, frozenset, bytes, jax.sharding.Mesh, tuple)
    return isinstance(value, wrong) or _is_array(value) or callable(value)


def _check(name: str, value: Any, parameter: inspect.Parameter, said_better: tuple[str, ...]) -> None:
    if name.endswith("axis_name"):
        if value is not parameter.default and value is not None:
            refuse_axis(name, value)
        return
    if name.endswith("dtype") and name not in said_better and value is not None:
        try:
            jnp.dtype(value)
        except TypeError:
            raise TypeError(f"{name} must be a dtype, such as 'bfloat16' or 'float32', got {said(value)}") from None
    if name == "learning_rate" and not (_fits(value, float) or callable(value)):
        raise TypeError(f"{name} must be a number or a schedule of optax, such as 0.1, got {said(value)}")
    wanted = list(_types(parameter.annotation))
    if name in said_better or value is parameter.default or any(_fits(value, kind) for kind in wanted):
        return
    what = " or ".join(dict.fromkeys(_word(kind) for kind in wanted))
    raise TypeError(
        f"{name} must be {what}{_such_as(name, parameter, wanted)}, got {said(value)}{_hint(value, wanted)}"
    )


def _types(annotation: Any) -> Iterator[Any]:
    """Yields the types that an annotation is a union of."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _types(part)
    else:
        yield type(None) if annotation is None else annotation


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        # The function itself says which names are known, and which is the nearest.
        return True
    if not isinstance(origin, type) or origin is object:
        return True
    if origin is bool:
        return _is_array(value) or value in (True, False)
    if issubclass(origin, jax.Array):
        return _is_array(value) or isinstance(value, (numbers.Number, list, tuple))
    if origin is int:
        # A bool is an int too; the function refuses it where it matters.
        return _is_array(value) or isinstance(value, numbers.Real)
    if origin is float:
        return _is_array(value) or (isinstance(value, numbers.Real) and not isinstance(value, bool))
    if origin in _FUNCTIONS:
        return callable(value)
    if origin in (tuple, collections.abc.Sequence, collections.abc.Iterable):
        of_strings = str in typing.get_args(kind)
        return isinstance(value, collections.abc.Iterable) and (of_strings or not isinstance(value, (str, bytes, dict)))
    if fields := getattr(origin, "_fields", ()):
        return all(hasattr(value, field) for field in fields)
    if origin is jax.sharding.Mesh:
        # An abstract mesh, or any other value with axes, is accepted.
        return hasattr(value, "axis_names")
    if not origin.__module__.startswith("gradcomp_jax") and origin not in (str, type(None)):
        return origin is not collections.abc.Mapping or isinstance(value, collections.abc.Mapping)
    return isinstance(value, origin)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _word(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin in (int, float, bool):
        return {int: "a whole number", float: "a number", bool: "True or False"}[origin]
    name = getattr(origin, "__name__", str(origin)).removesuffix("ExtraArgs")
    return _KINDS.get(name, (f"a {name}", ""))[0]


def _such_as(name: str, parameter: inspect.Parameter, wanted: list[Any]) -> str:
    kinds = [typing.get_origin(kind) or kind for kind in wanted]
    names = [getattr(kind, "__name__", "").removesuffix("ExtraArgs") for kind in kinds]
    of_type = next((example for name in names if (example := _KINDS.get(name, ("", ""))[1])), "")
    default = parameter.default
    plain = repr(default) if isinstance(default, (int, float, str)) and not isinstance(default, bool) else ""
    by_name = EXAMPLES.get(name, "")
    if "Mapping" in names and not by_name.startswith("{"):
        # Several functions have an argument of this name, and here it must be a mapping.
        by_name = ""
    example = by_name or plain or of_type
    return f", such as {example}" if example else ""


def meant(value: Any) -> str:
    """Returns what to give instead of a transformation or the name of a compressor; empty for other values."""
    if hasattr(value, "init") and hasattr(value, "update"):
        return (
            ": a transformation goes into optax.chain by itself; here goes what sends, one of gradcomp_jax.compressors"
        )
    if isinstance(value, str) or callable(value):
        return ": write gradcomp_jax.compressors.topk(0.01), or another of gradcomp_jax.compressors"
    return ""


def _hint(value: Any, wanted: list[Any]) -> str:
    """Returns a hint at what the value may have been meant for."""
    names = [getattr(kind, "__name__", "") for kind in wanted]
    if "Compressor" in names:
        return meant(value)
    if {"Memory", "Collective"} & set(names) and callable(value):
        return ": call it, for what it returns"
    if any(name.startswith("GradientTransformation") for name in names):
        if hasattr(value, "encode"):
            return ": gradcomp_jax.exchange(compressor, axis_name=...) makes one of a compressor"
        if callable(value):
            return ": call it first, with its axis_name"
    if isinstance(value, str) and {int, float} & set(wanted):
        try:
            float(value)
        except ValueError:
            return ""
        return f": write it without quotes, {value.strip()}"
    return ""


def said(value: Any) -> str:
    """Returns a value as error messages show it."""
    if hasattr(value, "init") and hasattr(value, "update"):
        return "a gradient transformation"
    text = f"the function {value.__name__}" if inspect.isfunction(value) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _unbound(name: str, parameters: Any, args: tuple[Any, ...], options: dict[str, Any], problem: str) -> str:
    by_position = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in parameters.values() if p.kind == p.KEYWORD_ONLY]
    if len(args) > len(by_position):
        extra = args[len(by_position) :]
        free = [p for p in by_name if p.name not in options]
        named = ", ".join(f"{p.name}={said(value)}" for p, value in zip(free, extra, strict=False))
        first = ", ".join(p.name for p in by_position)
        begin = f"only {first} by position" if first else "no arguments by position"
        return f"{name}() takes {begin}: " + (
            f"give what follows by name, such as {named}" if named else "leave the rest out"
        )
    known = [p.name for p in (*by_position, *by_name)]
    if unknown := [option for option in options if option not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
        return f"{name}() got an unexpected keyword argument {unknown[0]!r}: {hint}"
    taken = {p.name for p in by_position[: len(args)]} | set(options)
    missing = [p for p in (*by_position, *by_name) if p.default is p.empty and p.name not in taken]
    if not missing:
        return f"{name}(): {problem}; give each argument once"
    named = ", ".join(f"{p.name}={_example(p)}" for p in missing)
    return f"{name}() is missing {' and '.join(repr(p.name) for p in missing)}: give {named}"


def _example(parameter: inspect.Parameter) -> str:
    found = _such_as(parameter.name, parameter, list(_types(parameter.annotation)))
    return found.removeprefix(", such as ") or "..."
