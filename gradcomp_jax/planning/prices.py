"""Prices of methods in steps: how many steps a run needs to reach what a dense run reaches."""

import dataclasses
import functools
import json
import math
import numbers
import pathlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from gradcomp_jax import _checks
from gradcomp_jax.methods.registry import METHODS
from gradcomp_jax.planning import task as tasks

BASELINES = ("dense", "dense_bf16")
DATA = pathlib.Path(__file__).with_name("prices.json")
"""Prices by method, as ``benchmarks/prices.py`` writes them from the runs of ``benchmarks/accuracy.py``."""


_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("steps", "dense_steps"), (numbers.Real, "a number")),
    **dict.fromkeys(("workers", "seeds"), (numbers.Integral, "a whole number")),
    **dict.fromkeys(("task", "kind", "optimizer", "options", "page"), (str, "text")),
    "reached": (bool, "true or false"),
}
_SHOWN = 0.005
"""The least fraction of dense steps that a text mentions."""


@dataclasses.dataclass(frozen=True)
class Price:
    """Says how many steps a method needs to reach what the dense baseline reaches, over the steps of the baseline.

    Attributes:
        steps: the factor, above 0.
        reached: whether the method's runs came that far. If not, ``steps`` is a lower bound.
        spread: the least and the largest factor of single seeds; ``None`` if it is not known.
        task: what was trained.
        kind: kind of the model, of :data:`gradcomp_jax.planning.task.TASKS`.
        optimizer: the optimizer that trained it, of :data:`gradcomp_jax.planning.task.OPTIMIZERS`.
        workers: the number of workers that trained it.
        seeds: the number of runs behind the factor.
        options: options of the method that are not its defaults.
        page: the page that has the runs.
        dense_steps: fraction of the runs' steps that were dense float32, as in a warm-up; steps that are partly dense count as
            the number of dense steps that send the same bytes.
    """

    steps: float
    reached: bool = True
    spread: tuple[float, float] | None = None
    task: str = ""
    kind: str = ""
    optimizer: str = ""
    workers: int = 0
    seeds: int = 0
    options: str = ""
    page: str = ""
    dense_steps: float = 0.0

    def __post_init__(self) -> None:
        """Refuses values that no price can have."""
        for name, (kind, said) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"{name} of a price must be {said}, got {reprlib.repr(value)}")
        if not 0 <= self.dense_steps <= 1:
            raise ValueError(f"dense_steps of a price must be in [0, 1], got {self.dense_steps}")
        if not (self.steps > 0 and math.isfinite(self.steps)):
            raise ValueError(
                f"a price in steps must be finite and above 0, got {self.steps}: 1.2 for a fifth more steps than dense;"
                " reached=False where runs did not come that far"
            )

    @property
    def factor(self) -> float:
        """Returns the factor of a step: at least 1, because compression does not improve training."""
        return max(1.0, self.steps)

    @property
    def source(self) -> str:
        """Returns where the price comes from, for instance ``enwik8, adamw, 8 workers, 3 seeds``."""
        workers, seeds = _count(self.workers, "worker"), _count(self.seeds, "seed")
        dense = f"{self.dense_steps:.0%} of its steps dense" if self.dense_steps >= _SHOWN else ""
        return (
            ", ".join(part for part in (self.task, self.optimizer, workers, seeds, dense, self.options) if part)
            or "given"
        )

    def __str__(self) -> str:
        """Returns ``1.32x``, or ``> 1.32x``."""
        return f"{'' if self.reached else '> '}{self.steps:.2f}x"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}" if number else ""


Prices = Mapping[str, Price | float]
"""Prices by the name of a method; a number is a factor that was reached."""


@functools.cache
def measured() -> Mapping[str, tuple[Price, ...]]:
    """Returns the package's own prices: for each method, one for each kind of model, optimizer and number of workers."""
    kept = json.loads(DATA.read_text(encoding="utf-8"))
    return {name: tuple(_read(name, fields) for fields in each) for name, each in kept.items()}


@functools.lru_cache(maxsize=1024)
def comparable(task: str | None, optimizer: str | None, workers: int) -> Mapping[str, Price]:
    """Returns the package's prices for a kind of model and an optimizer, by method.

    Runs of at least half as many workers are comparable: selections cost more steps with more workers. Runs with default
    options are preferred, and the highest of several prices counts. If the task is not known, the highest of all kinds counts.

    Args:
        task: a kind of model, of :data:`gradcomp_jax.planning.task.TASKS`; ``None`` if it is not known.
        optimizer: an optimizer, of :data:`gradcomp_jax.planning.task.OPTIMIZERS`; ``None`` for any.
        workers: the number of workers that exchange; 0 for any.

    Raises:
        ValueError: for an unknown task or optimizer.
    """
    tasks.check(task, optimizer)
    found = {}
    for name, each in measured().items():
        of_kind: dict[str, list[Price]] = {}
        for price in each:
            same = optimizer is None or tasks.same_optimizer(price.optimizer, optimizer)
            if same and task in (None, price.kind) and 2 * price.workers >= workers:
                of_kind.setdefault(price.kind, []).append(price)
        if of_kind:
            best = (highest([p for p in prices if not p.options] or prices) for prices in of_kind.values())
            found[name] = highest(list(best))
    return found


def highest(prices: Sequence[Price]) -> Price:
    """Returns the highest price."""
    return max(prices, key=lambda price: price.steps)


def from_dict(prices: Mapping[str, Any]) -> dict[str, Price]:
    """Returns prices from JSON data: for each method a factor, or the fields of :class:`Price`.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(prices, Mapping):
        raise ValueError(f"prices must be by method, such as {{'dgc': 1.2}}, got {reprlib.repr(prices)}")
    return {name: _read(name, fields) for name, fields in prices.items()}


def checked(
    prices: Prices | None, *, task: str | None = None, optimizer: str | None = None, workers: int = 0
) -> Mapping[str, Price]:
    """Returns the given prices, with factors as :class:`Price`; for ``None`` those of :func:`comparable`."""
    tasks.check(task, optimizer)
    if prices is None:
        return comparable(task, optimizer, workers)
    for name in prices:
        _checks.one_of("method of a price", name, METHODS)
        if name in BASELINES:
            raise ValueError(
                f"{name} has no price, because it is what the steps of the others are held against: leave it out"
            )
    return {name: given if isinstance(given, Price) else Price(given) for name, given in prices.items()}


def _read(name: str, given: Any) -> Price:
    try:
        fields: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"steps": given}
        if fields.get("spread") is not None:
            low, high = fields["spread"]
            fields["spread"] = (low, high)
        return Price(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f'the price of {name} must be a factor, or {{"steps": 1.2, ...}}: {error}') from error
