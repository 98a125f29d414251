"""Policies choose a compressor for each tensor: by size, by path, by shape."""

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from gradcomp_jax import _arguments, _checks, _markdown, kernels
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.core.matrix_view import Matrix, Sides, is_vector, last_against_others, says, sides_of

_LONGEST = 2**20  # most entries of a block

Uncompressed = Literal["dense", "averaged"]
Choice = Compressor | Uncompressed
"""What becomes of a tensor: a compressor; ``"dense"``, sent whole together with all others that are; ``"averaged"``, passed
through because it is the workers' mean already."""


class Policy(abc.ABC):
    """Chooses for every tensor, from its path and shape alone, so that all workers make the same choice."""

    @abc.abstractmethod
    def choose(self, path: str, leaf: jax.ShapeDtypeStruct) -> Choice:
        """Returns the choice for one tensor.

        Raises:
            ValueError: if no rule matches it.
        """

    @abc.abstractmethod
    def compressors(self) -> Iterator[Compressor]:
        """Returns every compressor that is known before a tensor is seen."""

    def patterns(self) -> Iterator[str]:
        """Returns every pattern that should be found in some path."""
        return iter(())

    def explain(self, params: PyTree) -> str:
        """Returns a table of what becomes of every tensor: its path, shape, compressor, and a worker's bytes on the uplink.

        Bytes are the payload's, float32 where a tensor goes dense; a statistic that crosses beside it is not counted. The table
        marks tensors of two or more dimensions that go dense because their name is that of a vector.

        Args:
            params: arrays or shapes.

        Raises:
            ValueError: if no rule matches a tensor.
        """
        rows = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name, spec = path_name(path), jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
            choice = self.choose(name, spec)
            sent = {"dense": 4 * spec.size, "averaged": 0}.get(choice) if isinstance(choice, str) else None
            if isinstance(choice, Compressor):
                sent = choice.payload_bytes(_row_count(choice, spec.shape))
            shape = " x ".join(str(n) for n in spec.shape)
            stacked = choice == "dense" and len(spec.shape) > 1 and is_vector(name)
            rows.append((name, shape, "dense, stacked vectors" if stacked else choice, f"{sent:,}"))
        return "\n".join(_markdown.table(("tensor", "shape", "compressor", "bytes"), rows, align="lllr"))

    def masked(self) -> "Policy":
        """Returns the policy for the leaves of a mask, which replaces the policy's own rule of what is worth compressing.

        Raises:
            ValueError: if the policy takes no mask.
        """
        raise ValueError("a policy says which leaves are compressed; leave mask= out, or give it one compressor")


Rule = Choice | Policy


@dataclasses.dataclass(frozen=True)
class BySize(Policy):
    """Implements :func:`by_size`."""

    rules: tuple[tuple[int, Rule], ...]

    def choose(self, path: str, leaf: jax.ShapeDtypeStruct) -> Choice:
        """Takes the rule of the largest bound that the tensor reaches."""
        rule = next((rule for least, rule in reversed(self.rules) if leaf.size >= least), None)
        begins = f"with {leaf.size} entries: its rules begin at {self.rules[0][0]}; add 0: 'dense'"
        return _resolve(rule, path, leaf, f"by_size has no rule for {path!r} {begins}")

    def compressors(self) -> Iterator[Compressor]:
        """Yields the compressors of all rules."""
        return _known(rule for _, rule in self.rules)

    def patterns(self) -> Iterator[str]:
        """Yields the patterns of policies within."""
        return _patterns(rule for _, rule in self.rules)


@dataclasses.dataclass(frozen=True)
class ByPath(Policy):
    """Implements :func:`by_path`."""

    pattern: str
    rule: Rule
    otherwise: Rule | None

    def choose(self, path: str, leaf: jax.ShapeDtypeStruct) -> Choice:
        """Takes the rule if the pattern is found in the path."""
        rule = self.rule if re.search(self.pattern, path) else self.otherwise
        remedy = "pass otherwise='dense', a compressor or another policy"
        return _resolve(rule, path, leaf, f"by_path({self.pattern!r}, ...) has no rule for {path!r}; {remedy}")

    def compressors(self) -> Iterator[Compressor]:
        """Yields the compressors of both rules."""
        return _known(rule for rule in (self.rule, self.otherwise) if rule is not None)

    def patterns(self) -> Iterator[str]:
        """Yields its own pattern and those of policies within."""
        yield self.pattern
        yield from _patterns(rule for rule in (self.rule, self.otherwise) if rule is not None)


@dataclasses.dataclass(frozen=True)
class ByShape(Policy):
    """Makes a compressor for the two sides of each tensor's matrices, where that sends less; see :func:`by_matrix`."""

    make: Callable[[int, int], Compressor]
    sides: Sides
    dense: Compressor
    matrix: Matrix | None = dataclasses.field(default=None, hash=False)
    only_if_smaller: bool = True

    def choose(self, path: str, leaf: jax.ShapeDtypeStruct) -> Choice:
        """Makes a compressor for a tensor that is a matrix, or several of one shape, and not a stack of vectors by its name."""
        sides = self.sides(path, leaf)
        if sides is None:
            return "dense"
        if self.only_if_smaller and is_vector(path) and not says(self.matrix, path, leaf):
            return "dense"
        code = self.make(*sides)
        return code if not self.only_if_smaller or smaller(code, self.dense, leaf.shape) else "dense"

    def masked(self) -> "Policy":
        """Returns the policy for every matrix of a mask, also where that does not send fewer bytes."""
        return dataclasses.replace(self, only_if_smaller=False)

    def compressors(self) -> Iterator[Compressor]:
        """Returns nothing: the compressors depend on the tensors."""
        return iter(())


def by_matrix(make: Callable[[int, int], Compressor], *, dense: Compressor, matrix: Matrix | None = None) -> Policy:
    """Sees a tensor as a matrix, or as several of one shape, and makes a compressor for its two sides.

    The block of the compressor is one matrix. By default a tensor is one matrix, whose rows are the leading dimensions that
    make rows + columns fewest. Stacked vectors, which are known by their names (``layers/norm/scale``), go dense.

    Args:
        make: ``make(rows, columns) -> compressor``, equal for equal sides.
        dense: compressor of the tensors that go dense. A tensor goes dense where that sends no more bytes. A mask, given to
            the exchange, replaces that rule.
        matrix: which dimensions are what, by path: see :func:`gradcomp_jax.powersgd`.

    Raises:
        ValueError: for a split that leaves no rows or columns.
        TypeError: for an invalid split.
    """
    return ByShape(make, sides_of(matrix), dense, matrix)


def by_column(make: Callable[[int], Compressor], *, dense: Compressor) -> Policy:
    """Makes a compressor for a tensor's columns, as :func:`by_matrix` does, for an exchange with ``view="columns"``."""
    return ByShape(lambda rows, columns: make(rows), last_against_others, dense)


def by_tensor(make: Callable[[int], Compressor], *, dense: Compressor) -> Policy:
    """Makes a compressor whose block is a whole tensor, or the longest equal part of it that has at most 2**20 entries.

    The arguments are as in :func:`by_matrix`.
    """

    def part(size: int) -> int:
        return -(-size // -(-size // _LONGEST))

    return ByShape(lambda rows, columns: make(part(rows * columns)), last_against_others, dense)


@_arguments.checked
def by_size(rules: Mapping[int, Rule]) -> Policy:
    """Chooses by the number of entries.

    Example:
        >>> codes = gc.by_size({0: "dense", 2**14: gc.compressors.block_quantized(bits=8)})
        >>> tx = optax.chain(gc.exchange(codes, axis_name="data"), optax.sgd(0.1))
        >>> print(codes.explain(params).splitlines()[2])  # tensor, shape, compressor, bytes
        | bias | 256 | dense | 1,024 |

    Args:
        rules: maps the number of entries from which a rule holds to the rule: a compressor, ``"dense"``, ``"averaged"`` or
            another policy.

    Returns:
        A policy, for :func:`gradcomp_jax.exchange`; its ``explain(params)`` shows what becomes of each tensor.

    Raises:
        ValueError: for no rules and for negative bounds; when traced, for a tensor below the smallest bound.
        TypeError: for any other rule.
    """
    if not rules:
        raise ValueError("by_size needs at least one rule, such as {0: 'dense'}")
    for least, rule in rules.items():
        _checks.at_least_zero("the bound of a rule", _checks.static_number("the bound of a rule", least))
        _check_rule(rule)
    return BySize(tuple(sorted(rules.items(), key=lambda item: item[0])))


@_arguments.checked
def by_path(pattern: str, rule: Rule, *, otherwise: Rule | None = None) -> Policy:
    r"""Chooses by the tensor's path in the tree, which reads like ``"encoder/layer_0/kernel"``.

    Example:
        >>> codes = gc.by_path("bias", "dense", otherwise=gc.compressors.topk(0.01))
        >>> tx = optax.chain(gc.exchange(codes, axis_name="data"), optax.sgd(0.1))
        >>> print(codes.explain(params).splitlines()[2])  # tensor, shape, compressor, bytes
        | bias | 256 | dense | 1,024 |

    Args:
        pattern: a regular expression, searched for anywhere in the path.
        rule: for the tensors it is found in: a compressor, ``"dense"``, ``"averaged"`` or another policy.
        otherwise: for the others. Without it, a tensor that does not match is an error.

    Returns:
        A policy, for :func:`gradcomp_jax.exchange`; its ``explain(params)`` shows what becomes of each tensor.

    Raises:
        ValueError: if ``pattern`` is not a regular expression; when traced, for a tensor without a rule.
        TypeError: for any other rule.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}") from error
    _check_rule(rule)
    if otherwise is not None:
        _check_rule(otherwise)
    return ByPath(pattern, rule, otherwise)


def smaller(compressor: Compressor, dense: Compressor, shape: tuple[int, ...]) -> bool:
    """Returns whether a compressor sends fewer bytes of a tensor than a dense one does."""
    rows, dense_rows = _row_count(compressor, shape), _row_count(dense, shape)
    mean = compressor.statistic_spec(1) if compressor.side_information == "mean" else None
    besides = 0 if mean is None else rows * mean.size * mean.dtype.itemsize
    return rows * compressor.payload_bytes(1) + besides < dense_rows * dense.payload_bytes(1)


def _row_count(compressor: Compressor, shape: tuple[int, ...]) -> int:
    """Returns the number of rows that a tensor has by itself; dealt blocks may be a few more than it needs."""
    block = compressor.block
    rows = kernels.row_count(math.prod(shape), block)
    return kernels.dealt_rows(rows * block, block, kernels.periods_of(shape)) if compressor.deals else rows


def _resolve(rule: Rule | None, path: str, leaf: jax.ShapeDtypeStruct, missing: str) -> Choice:
    if rule is None:
        raise ValueError(missing)
    return rule.choose(path, leaf) if isinstance(rule, Policy) else rule


def _known(rules: Iterator[Rule]) -> Iterator[Compressor]:
    for rule in rules:
        if isinstance(rule, Compressor):
            yield rule
        elif isinstance(rule, Policy):
            yield from rule.compressors()


def _patterns(rules: Iterator[Rule]) -> Iterator[str]:
    for rule in rules:
        if isinstance(rule, Policy):
            yield from rule.patterns()


def warn_of_idle_patterns(policy: Policy, paths: Sequence[str]) -> None:
    """Warns of a pattern that is found in no tensor's path: it is misspelt, or the model has changed."""
    for pattern in policy.patterns():
        if paths and not any(re.search(pattern, path) for path in paths):
            _checks.warn(
                f"the pattern {pattern!r} of by_path is found in none of the {len(paths)} tensors' paths, which read like"
                f" {paths[0]!r}; policy.explain(params) shows what becomes of each"
            )


def _check_rule(rule: Rule) -> None:
    if not isinstance(rule, (Compressor, Policy)) and rule not in get_args(Uncompressed):
        raise TypeError(
            f"a rule must be a compressor, such as gradcomp_jax.compressors.topk(0.01), 'dense', 'averaged' or a policy, got"
            f" {_arguments.said(rule)}{_arguments.meant(rule)}"
        )
