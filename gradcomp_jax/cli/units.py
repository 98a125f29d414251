"""Quantities as people write them: 10Gbit, 180ms, 25.6M."""

import math
import re
from collections.abc import Mapping

import quantiphy

from gradcomp_jax._errors import SettingError

_BITS = {"bit": 1, "bits": 1, "bit/s": 1, "bits/s": 1, "bps": 1, "b": 1, "b/s": 1}
_BYTES = {"byte": 8, "bytes": 8, "byte/s": 8, "bytes/s": 8, "Bps": 8, "B": 8, "B/s": 8}
# Nobody means a thousandth of a bit: 10gbps and 100mbit are 10G and 100M.
_LOWER_PREFIX = re.compile(r"(?<=[\d\s.])[kmgt](?=b)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "sec": 1.0}
# Of parameters, B is a billion.
_COUNTS = {"": 1.0, "B": 1e9, "b": 1e9}
_FASTEST, _LONGEST, _MOST = 1e18, 604_800, 10**12
"""Bytes per second of a link or a memory, seconds (a week), and parameters of a model."""


def rate(option: str, text: str) -> float:
    """Bytes per second: ``10Gbit``, ``10 Gbit/s``, ``10gbps``, ``10Gb/s``, ``1.25GB/s``. A small b is a bit.

    Raises:
        SettingError: for anything else, and for a rate that is not above 0, or that no link has.
    """
    remedy = "a number with bit/s or B/s, such as 10Gbit or 1.25GB/s"
    upper = _LOWER_PREFIX.sub(lambda found: found[0].upper(), text)
    bits = _parse(option, upper, {**_BITS, **_BYTES}, remedy)
    if not 0 < bits <= 8 * _FASTEST:
        raise SettingError(f"{option} must be above 0 and at most {_FASTEST / 1e15:g} PB/s, got {text!r}")
    return bits / 8


def seconds(option: str, text: str) -> float:
    """Seconds: ``180ms``, ``50us``, ``0``.

    Raises:
        SettingError: for anything else, and for a time below 0 or above a week.
    """
    if text.strip() == "0":
        return 0.0
    found = _parse(option, text, _SECONDS, "a number with s, ms, us or ns, such as 180ms")
    if not 0 <= found <= _LONGEST:
        raise SettingError(f"{option} must be at least 0 and at most {_LONGEST:,} s, got {text!r}")
    return found


def count(option: str, text: str) -> int:
    """A whole number: ``25.6M``, ``8B``, ``25557032``.

    Raises:
        SettingError: for anything else, for less than 1, and for more than a million million.
    """
    found = _parse(option, text, _COUNTS, "a number, such as 25.6M, 8B or 25557032")
    if not 1 <= found <= _MOST:
        raise SettingError(f"{option} must be at least 1 and at most {_MOST:,}, got {text!r}")
    return round(found)


def _parse(option: str, text: str, units: Mapping[str, float], remedy: str) -> float:
    try:
        quantity = quantiphy.Quantity(text)
    except quantiphy.QuantiPhyError as error:
        raise SettingError(f"{option} must be {remedy}, got {text!r}") from error
    factor = units.get(quantity.units)
    if factor is None or not math.isfinite(quantity):
        raise SettingError(f"{option} must be {remedy}, got {text!r}")
    return float(quantity) * factor


def show_rate(bytes_per_second: float) -> str:
    """Returns a rate in the unit that networks are sold in: ``3.1 Gbit/s``."""
    return _show(8 * bytes_per_second, "bit/s")


def show_seconds(value: float) -> str:
    """Returns a time with its unit: ``180 ms``."""
    return "0" if value == 0 else _show(value, "s")


def show_bytes(value: float) -> str:
    """Returns a number of bytes with its unit: ``97.5 MB``."""
    return "0" if value == 0 else _show(value, "B")


def _show(value: float, unit: str) -> str:
    return quantiphy.Quantity(value, unit).render(prec=2)
