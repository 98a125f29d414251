"""Quantities as people write them: 10Gbit, 180ms, 25.6M."""

import re
from collections.abc import Mapping

import quantiphy

from gradcomp_jax._errors import SettingError

# The whole text, so that an address, a range or a list is not taken for its last number; groups of three as a plan shows them.
_QUANTITY = re.compile(
    r"(\d+(?:\.\d*)?|\.\d+|\d{1,3}(?:[,_]\d{3})+)(e[+-]?\d+)?\s*([a-z\u00b5\u03bc/]*)", re.ASCII | re.IGNORECASE
)
_THOUSANDS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BITS = dict.fromkeys(("bit", "bits", "bit/s", "bits/s", "bps", "b", "b/s"), 1.0)
_BYTES = dict.fromkeys(("byte", "bytes", "byte/s", "bytes/s", "Bps", "B", "B/s"), 8.0)
# Nobody means a thousandth of a bit: 10gbps and 100mbit are 10G and 100M.
_RATE_PREFIXES = {**_THOUSANDS, **{name.lower(): factor for name, factor in _THOUSANDS.items()}, "K": 1e3}
_RATES = {
    prefix + unit: bits * factor
    for prefix, factor in {"": 1.0, **_RATE_PREFIXES}.items()
    for unit, bits in {**_BITS, **_BYTES}.items()
}
_SIZES = {prefix + unit: factor for prefix, factor in {"": 1.0, **_RATE_PREFIXES}.items() for unit in ("B", "b")}
_PARTS = {"": 1.0, "m": 1e-3, "u": 1e-6, "\u00b5": 1e-6, "\u03bc": 1e-6, "n": 1e-9}
_SECONDS = {prefix + unit: factor for prefix, factor in _PARTS.items() for unit in ("s", "sec")}
# Of parameters, B is a billion, and no prefix goes with it.
_COUNTS = {"": 1.0, "B": 1e9, "b": 1e9, "K": 1e3, **_THOUSANDS}
_FASTEST, _LONGEST, _MOST = 1e18, 604_800, 10**12
"""Bytes per second of a link or a memory, seconds (a week), and parameters of a model."""


def rate(option: str, text: str) -> float:
    """Reads bytes per second: ``10Gbit``, ``10 Gbit/s``, ``10gbps``, ``10Gb/s``, ``1.25GB/s``. A small b is a bit.

    Raises:
        SettingError: for anything else, and for a rate that is not above 0, or that no link has.
    """
    remedy = "a number with bit/s or B/s, such as 10Gbit or 1.25GB/s"
    bits = _parse(option, text, _RATES, remedy)
    if not 0 < bits <= 8 * _FASTEST:
        raise SettingError(f"{option} must be above 0 and at most {_FASTEST / 1e15:g} PB/s, got {text!r}")
    return bits / 8


def size(option: str, text: str) -> float:
    """Reads bytes: ``80GB``, ``80 GB``, ``80gb``.

    Raises:
        SettingError: for anything else, and for less than one.
    """
    found = _parse(option, text, _SIZES, "a number with B, such as 80GB")
    if not 1 <= found <= _FASTEST:
        raise SettingError(f"{option} must be at least 1 byte and at most {_FASTEST / 1e15:g} PB, got {text!r}")
    return found


def seconds(option: str, text: str) -> float:
    """Reads seconds: ``180ms``, ``50us``, ``0``.

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
    """Reads a whole number: ``25.6M``, ``8B``, ``25557032``.

    Raises:
        SettingError: for anything else, for less than 1, and for more than a million million.
    """
    found = _parse(option, text, _COUNTS, "a number, such as 25.6M, 8B or 25557032")
    if not 1 <= found <= _MOST:
        raise SettingError(f"{option} must be at least 1 and at most {_MOST:,}, got {text!r}")
    return round(found)


def _parse(option: str, text: str, units: Mapping[str, float], remedy: str) -> float:
    found = _QUANTITY.fullmatch(text.strip().removeprefix("-"))
    factor = units.get(found[3]) if found else None
    if found is None or factor is None:
        raise SettingError(f"{option} must be {remedy}, got {text!r}")
    number = float(re.sub("[,_]", "", found[1]) + (found[2] or "")) * factor
    return -number if text.strip().startswith("-") else number


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
