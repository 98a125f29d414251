"""Validators for what users pass. Every message names the value and the remedy."""

import dataclasses
import difflib
import math
import numbers
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax._errors import SettingError
from gradcomp_jax._typing import Array

_NOT_THE_USERS = ("gradcomp_jax", "jax", "optax", "contextlib", "functools")


def warn(message: str) -> None:
    """Warns a user at the line that called the library, whatever the number of library calls in between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def static_number(name: str, value: Any) -> float:
    """Returns ``value`` unchanged and refuses arrays, because the value decides a shape or a program."""
    if isinstance(value, str) and value.strip().lstrip("+-").replace(".", "", 1).isdecimal():
        raise TypeError(f"{name} must be a number, got {value!r}: write it without quotes")
    if isinstance(value, jax.Array) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a Python number, because shapes depend on it, got {type(value).__name__}; "
            f"under optax.inject_hyperparams add {name!r} to static_args"
        )
    return value


def number_of(unit: str, name: str, value: Any) -> None:
    """Refuses anything but a number, such as text with a unit or an array."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of {unit}, got {value!r}")


def in_unit_interval(name: str, value: Any) -> float:
    """Checks ``0 < value <= 1``."""
    number = static_number(name, value)
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}")
    return number


def above(name: str, value: Any, bound: float) -> float:
    """Returns a Python number above a bound."""
    number = static_number(name, value)
    if not number > bound:
        raise ValueError(f"{name} must be above {bound}, got {value!r}")
    return number


def positive_int(name: str, value: Any) -> int:
    """Checks for an integer of at least 1."""
    return _int_from(1, name, value)


def non_negative_int(name: str, value: Any) -> int:
    """Checks for an integer of at least 0."""
    return _int_from(0, name, value)


def _int_from(least: int, name: str, value: Any) -> int:
    number = static_number(name, value)
    if isinstance(value, bool) or not math.isfinite(number) or int(number) != number or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value}")
    return int(number)


def at_least_zero(name: str, value: Any) -> Any:
    """Checks ``value >= 0``; arrays (a schedule's value) are passed through unchecked."""
    _refuse_no_number(name, value)
    if isinstance(value, numbers.Real) and not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return value


def below_one(name: str, value: Any) -> Any:
    """Checks ``0 <= value < 1``; arrays are passed through unchecked."""
    if callable(value):
        raise TypeError(f"{name} must be a number, got a function: a schedule goes through optax.inject_hyperparams")
    _refuse_no_number(name, value)
    if isinstance(value, numbers.Real) and not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    return value


def _refuse_no_number(name: str, value: Any) -> None:
    """Refuses what is neither a number nor an array; the function of a schedule is refused elsewhere."""
    if not isinstance(value, numbers.Real) and not hasattr(value, "dtype") and not callable(value):
        raise TypeError(f"{name} must be a number, such as 0.9, got {value!r}")


def one_of(name: str, value: Any, choices: Iterable[Any]) -> Any:
    """Checks membership, suggesting the nearest name."""
    known = list(choices)
    if value not in known:
        same = next((c for c in known if not isinstance(c, str) and str(c) == str(value).strip()), None)
        if same is not None:
            kind = "an int" if type(same) is int else f"of type {type(same).__name__}"
            raise ValueError(f"{name} must be {kind}, {same!r}, got the {type(value).__name__} {value!r}")
        near = difflib.get_close_matches(str(value), [str(c) for c in known], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{hint}")
    return value


def dtype_among(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """Returns a dtype that is one of several."""
    resolved = jnp.dtype(value)
    if resolved.name not in choices:
        raise ValueError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {resolved.name}")
    return resolved


@dataclasses.dataclass(frozen=True)
class Range:
    """Describes the numbers that an option may be.

    Attributes:
      least: the smallest number; with ``open_below`` a bound that all are above.
      most: the largest number; with ``open_above`` a bound that all are below.
      whole: whether only whole numbers are in the range.
    """

    least: float
    most: float
    whole: bool = True
    open_below: bool = False
    open_above: bool = False

    def __contains__(self, value: Any) -> bool:
        """Returns whether a number is in the range; NaN is in no range."""
        above = value > self.least if self.open_below else value >= self.least
        below = value < self.most if self.open_above else value <= self.most
        return bool(above and below and (not self.whole or value == int(value)))

    def __str__(self) -> str:
        """Returns the range in the words of messages and help texts."""
        if self.whole:
            return f"a whole number from {self.least:,} to {self.most:,}"
        return f"in {'(' if self.open_below else '['}{self.least:,}, {self.most:,}{')' if self.open_above else ']'}"

    def check(self, name: str, value: Any) -> None:
        """Raises ``SettingError`` for a number that is not in the range."""
        if value not in self:
            raise SettingError(f"{name} must be {self}, got {value}")


def is_typed_key(value: Any) -> bool:
    """Returns whether a value is an array of typed PRNG keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def typed_key(name: str, given: Any) -> Array:
    """Returns a typed key from a seed, a typed key or a raw key."""
    # For a string JAX would raise an error without the remedy.
    dtype = np.dtype(object) if isinstance(given, str) else jnp.result_type(given)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return given
    if jnp.ndim(given) == 0 and jnp.issubdtype(dtype, jnp.integer):
        return jax.random.key(given)
    if jnp.ndim(given) == 1 and dtype == jnp.uint32:
        return jax.random.wrap_key_data(jnp.asarray(given))
    raise TypeError(f"{name} must be a seed or a key, such as jax.random.key(0), got {given!r}")
