"""An exchange in buckets, so that it can begin before the backward pass ends; and the order of the forward pass.

The context tells the exchange which leaves cross together. So no method needs an argument for it, and seeds and state are the
same as without buckets.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax import _arguments, _checks, _compat
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree
from gradcomp_jax.core.context import context_of, with_context


@_arguments.checked
def bucketed(
    exchange: optax.GradientTransformation, *, bucket_bytes: int, forward_order: Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the exchange into buckets in the order in which the backward pass finishes gradients.

    Without buckets, an exchange crosses in one buffer, which waits for the last gradient. Each bucket has its own collectives,
    which need only the bucket's gradients: a compiler that hides latency starts them while the backward pass continues.
    The results are the same as without buckets, with two exceptions: which worker keeps the rounding error of the downlink, and
    the random numbers of the downlink. A step with a non-finite gradient in any bucket is skipped in all of them. Each bucket
    costs the latency of its collectives, so buckets pay where bytes take longer than that: some megabytes of gradient each.

    Local clipping (``gc.dgc(clip_norm=...)``) needs the norm of the whole gradient before anything is sent, and
    ``view="tree"`` (gradient dropping) the whole gradient; with them nothing can begin early.

    Example:
        >>> tx = optax.chain(gc.bucketed(gc.block_quantized(axis_name="data"), bucket_bytes=4 << 20), optax.sgd(0.1))
        >>> state = gc.init_state(params, tx, mesh)

    Args:
        exchange: a method, :func:`gradcomp_jax.exchange`, :func:`gradcomp_jax.hierarchical`, or a chain with one in it.
        bucket_bytes: bytes of float32 gradient from which a bucket is full; one tensor is never cut.
        forward_order: paths of the parameters (``"layer/kernel"``) in the order of their first use, of which the backward
            pass is the reverse: :func:`gradcomp_jax.forward_order` reads it from a loss. By default what
            :func:`gradcomp_jax.make_train_step` has read from its loss, elsewhere the order of the paths with numbers as
            numbers.

    Returns:
        A transformation with the updates of ``exchange``.

    Raises:
        ValueError: for a size below 1; when traced, if ``forward_order`` lacks a tensor.

    References:
        Li et al., 2020, https://arxiv.org/abs/2006.15704, section 3.2.3 (gradient bucketing).
    """
    bucket_bytes = _checks.positive_int("bucket_bytes", bucket_bytes)
    inside = optax.with_extra_args_support(exchange)

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        order, read = forward_order, context_of(extra).forward_order
        if order is None and read is not None:
            order = read()
        extra = with_context(extra, buckets=buckets_of(updates, bucket_bytes, order))
        return inside.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inside.init, update)


def buckets_of(
    tree: PyTree, bucket_bytes: int, forward_order: Sequence[str] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the leaves' numbers, bucket after bucket, the last parameter of the forward pass first."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [path_name(path) for path, _ in leaves]
    place: Mapping[str, Any] = {name: _natural(name) for name in names}
    if forward_order is not None:
        place = {name: number for number, name in enumerate(forward_order)}
        if missing := [name for name in names if name not in place]:
            raise ValueError(
                f"forward_order lacks {missing[:3]} of {len(names)} tensors; gradcomp_jax.forward_order(loss, params, batch)"
                " reads the whole of it"
            )
    buckets: list[list[int]] = [[]]
    filled = 0
    for i in sorted(range(len(names)), key=lambda i: place[names[i]], reverse=True):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += 4 * jnp.size(leaves[i][1])
    return tuple(map(tuple, buckets))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key by which ``layer_2`` comes before ``layer_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@_arguments.checked
def forward_order(loss: Callable[..., Any], params: PyTree, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Returns the paths of the parameters in the order in which ``loss(params, *args)`` first computes with them.

    An operation on a parameter alone (a cast, a reshape, a scale) does not count as a use. A parameter that is never used
    comes last. Nothing is computed.

    Example:
        >>> gc.forward_order(loss, params, batch)
        ('kernel', 'bias')

    Args:
        loss: as for ``jax.value_and_grad``.
        params: arrays or shapes.
        *args: likewise.
        **kwargs: likewise.

    Returns:
        Paths, such as ``"layer/kernel"``.
    """
    closed = jax.make_jaxpr(lambda p, a, k: loss(p, *a, **k))(params, args, kwargs)
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found: list[int] = []
    aliases = {var: number for number, var in enumerate(closed.jaxpr.invars[: len(names)])}
    _read(closed.jaxpr, aliases, found)
    rest = [number for number in range(len(names)) if number not in found]
    return tuple(names[number] for number in [*found, *rest])


def _read(jaxpr: Any, aliases: dict[Any, int], found: list[int]) -> None:
    """Appends the parameters' numbers as they are used; ``aliases`` are the variables made of one parameter alone."""
    for equation in jaxpr.eqns:
        operands = [v for v in equation.invars if not _compat.is_literal(v)]
        used = [aliases[v] for v in operands if v in aliases]
        if not used:
            continue
        inner = next((p for p in map(_body, equation.params.values()) if p is not None), None)
        if inner is not None and len(inner.invars) == len(equation.invars):
            pairs = zip(inner.invars, equation.invars, strict=True)
            inside = {a: aliases[b] for a, b in pairs if not _compat.is_literal(b) and b in aliases}
            _read(inner, inside, found)
            for outer, result in zip(equation.outvars, inner.outvars, strict=False):
                if not _compat.is_literal(result) and result in inside:
                    aliases[outer] = inside[result]
        elif len(set(used)) == 1 and len(used) == len(operands):
            aliases.update(dict.fromkeys(equation.outvars, used[0]))
        else:
            found.extend(number for number in dict.fromkeys(used) if number not in found)


def _body(parameter: Any) -> Any:
    """Returns the program inside an equation, for instance that of a jitted or rematerialised function."""
    inner = getattr(parameter, "jaxpr", parameter)
    return inner if hasattr(inner, "eqns") else None
