"""The audit itself: bytes on the wire, read from a compiled program."""

from typing import Literal

import jax

from gradcomp_jax import _arguments
from gradcomp_jax.audit.axes import MeshAxes
from gradcomp_jax.audit.hlo import parse_module
from gradcomp_jax.audit.report import WireReport
from gradcomp_jax.audit.residuals import residual_gathers
from gradcomp_jax.audit.walk import Walker


@_arguments.checked
def wire_bytes(
    compiled: jax.stages.Compiled | str,
    *,
    branch: Literal["max", "min"] | int = "max",
    trip_count: int | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
) -> WireReport:
    r"""Counts the bytes that one device sends and receives in one run of a compiled program.

    The count comes from the program that the compiler made, not from the source: the compiler
    fuses collectives, widens their element types and replaces one by another.

    For a group of :math:`N` devices and a full array of :math:`m` bytes, under the bandwidth-optimal algorithm: all-reduce
    :math:`2\frac{N-1}{N}m`; all-gather, reduce-scatter and all-to-all :math:`\frac{N-1}{N}m`; permute, broadcast and send
    :math:`m`, the most that any one device sends. A count that is not whole is rounded up. Groups of unequal size count as the
    largest. A collective that TPU slices carry out through their hosts counts as that collective.

    Example:
        >>> compiled = gc.lower_update(params, gc.dense(axis_name="data"), mesh).compile()
        >>> gc.wire_bytes(compiled).sent  # bytes a worker sends in a step
        460551

    Args:
        compiled: a compiled program, or the HLO text of one.
        branch: which branch of a ``lax.cond`` or ``lax.switch`` counts: the most expensive one (``"max"``), the cheapest
            (``"min"``), or the one with this index; -1 is the last, and the true branch of a ``lax.cond`` is 1. A conditional
            without a branch of that index counts its most expensive one. The report keeps what each branch would send. A loop
            that runs at most once, as in methods with local steps, counts as such a conditional: branch 0 does not run it.
        trip_count: how often a ``while`` loop runs if the program does not say.
        mesh: the mesh that the program was compiled for, or an abstract one of its axes; with it every row names its axes.

    Returns:
        A :class:`~gradcomp_jax.audit.WireReport`; ``print`` shows it as a table. The report says that residuals cross if a
        program gathers per-device state outside of every ``jax.shard_map``, which happens if it pins a state replicated.

    Raises:
        ValueError: if an argument is out of range, if the text is not a compiled program, if an instruction looks like
            communication and is not known, or if a loop communicates an unknown number of times.
    """
    if branch not in ("max", "min") and (isinstance(branch, bool) or not isinstance(branch, int)):
        raise ValueError(f"branch must be 'max', 'min' or an index, got {branch!r}")
    if trip_count is not None and (not isinstance(trip_count, int) or trip_count < 0):
        raise ValueError(f"trip_count must be an int of at least 0, got {trip_count!r}")
    module = parse_module(_text_of(compiled))
    axes = None if mesh is None else MeshAxes(mesh, module.device_count)
    # HLO text does not say which arrays are state.
    trees = getattr(compiled, "in_tree", None), getattr(compiled, "out_tree", None)
    residuals = frozenset[str]() if trees[0] is None or trees[1] is None else residual_gathers(module, *trees)
    return Walker(module, branch, trip_count, axes, residuals).report()


def _text_of(compiled: jax.stages.Compiled | str) -> str:
    if isinstance(compiled, str):
        return compiled
    if not hasattr(compiled, "as_text") or hasattr(compiled, "compile"):
        # A program that is only lowered does not yet have the compiler's collectives.
        raise ValueError(
            f"wire_bytes takes a compiled program, got {type(compiled).__name__}: pass "
            "jax.jit(f).lower(...).compile(), or HLO text"
        )
    text = compiled.as_text()
    if not text:
        raise ValueError("this backend does not give the text of its compiled programs")
    return text
