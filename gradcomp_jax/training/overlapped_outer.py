"""Outer steps whose exchange runs beside the inner ones, in a thread."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from gradcomp_jax import _arguments
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.per_device import PerDevice
from gradcomp_jax.replicas import outer_average
from gradcomp_jax.replicas.fragments import Parts
from gradcomp_jax.replicas.outer import offset_of
from gradcomp_jax.training.overlapped import Link, OverlappedStep, arriving, beside, check_delay
from gradcomp_jax.training.resize import on_marks


@_arguments.checked
def make_overlapped_outer_step(
    loss: Callable[..., Any],
    method: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    every: int,
    delay: int,
    parts: Parts = 1,
    mix: float = 0.0,
    has_aux: bool = False,
    aux: PyTree = "auto",
    check_vma: bool = True,
) -> OverlappedStep:
    """Makes steps of ``optax.chain(optimizer, gc.outer_average(method, outer, ...))`` with the exchange in a parallel thread.

    It is to :func:`gradcomp_jax.outer_average`, and so to DiLoCo and SparseLoCo with a delay, what
    :func:`make_overlapped_step` is to delayed averages. At a part's turn the thread starts to exchange how far the replicas
    have moved that part, while inner steps continue. The mean is applied exactly ``delay`` steps later, however long the
    exchange takes: a step waits for it if necessary, and never applies it early. Parts are exchanged in the order of their
    turns, which is the same on all workers. So results and state are those of the one program, and either can continue from
    the other's state.

    Set ``PJRT_NPROC=4`` if a process has one core, as for :func:`make_overlapped_step`.

    Example:
        >>> method, outer = gc.block_quantized(axis_name="data", bits=4), optax.sgd(0.7, 0.9, nesterov=True)
        >>> step = gc.make_overlapped_outer_step(loss, method, optax.adamw(1e-3), outer, mesh, every=100, delay=5)
        >>> type(step).__name__  # call step(state, batch), and step.wait() at the end
        'OverlappedStep'

    Args:
        loss: as for :func:`make_train_step`.
        method: an exchange that needs no parameters, such as ``gc.block_quantized(axis_name=..., bits=4)``.
        optimizer: the optimizer of each replica's own steps.
        outer: the outer optimizer, such as ``optax.sgd(0.7, 0.9, nesterov=True)``.
        mesh: the mesh of ``init_state``.
        axis_name: the axis of the workers.
        every: as for :func:`gradcomp_jax.outer_average`.
        delay: as for :func:`gradcomp_jax.outer_average`, at least 1.
        parts: as for :func:`gradcomp_jax.outer_average`.
        mix: as for :func:`gradcomp_jax.outer_average`.
        has_aux: as for :func:`make_train_step`.
        aux: as for :func:`make_train_step`.
        check_vma: as for :func:`make_train_step`.

    Returns:
        ``step``, as from :func:`make_overlapped_step`: call ``step.wait()`` at the end.

    Raises:
        ValueError: without a delay; if the mesh has no such axis; for a state without replicas; and as
            :func:`gradcomp_jax.outer_average` does.
    """
    check_delay(delay)
    options: dict[str, Any] = {"axis_name": axis_name, "every": every, "parts": parts, "delay": delay, "mix": mix}
    tx = optax.chain(optimizer, outer_average(method, outer, **options))
    quiet = optax.chain(optimizer, outer_average(arriving(method), outer, **options))

    def departs(step: int, count: int) -> int | None:
        turns = {every - 1 - offset_of(part, count, every): part for part in range(count)}
        return turns.get(step % every) if step >= 0 else None

    # Copied, because the next step takes the memory of the state.
    copied = jax.jit(lambda flying: on_marks(flying, lambda mark: PerDevice(jnp.copy(mark.value), 1, lifted=True)))
    link = Link(
        # The link is after the replica's own optimizer.
        place=1,
        delay=delay,
        every=every,
        departs=departs,
        pick=lambda late, _, part: copied(late.flying[part]),
        methods=lambda late: late.method,
        with_methods=lambda late, methods: dataclasses.replace(late, method=methods),
    )
    given: dict[str, Any] = {"axis_name": axis_name, "has_aux": has_aux, "aux": aux, "check_vma": check_vma}
    return beside(loss, (tx, quiet, method), mesh, link, **given)
