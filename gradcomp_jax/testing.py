"""Assertions for tests of programs, with methods of this package or without."""

from collections.abc import Iterable
from typing import Any

import jax

from gradcomp_jax import _arguments
from gradcomp_jax.audit.axes import mesh_of
from gradcomp_jax.audit.limits import WORDS, Limits
from gradcomp_jax.audit.report import WireReport, aligned
from gradcomp_jax.audit.wire_bytes import wire_bytes

__all__ = ["assert_wire"]


@_arguments.checked
def assert_wire(
    compiled: jax.stages.Compiled | str | WireReport,
    *,
    axis: str | tuple[str, ...] | None = None,
    at_most: float | None = None,
    dtypes: Any = None,
    kinds: str | Iterable[str] | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
) -> None:
    """Asserts what a compiled program sends between devices, for any program.

    Compilers widen element types, replace collectives by others and add some of their own, so a test reads the program that
    runs. A state of this package that crosses because it was pinned replicated fails in any case. Kinds and dtypes are free
    where a device puts at most 1 KiB into all collectives of one kind and dtype, such as the mean of a loss.

    Example:
        >>> step = gc.lower_update(params, gc.dense(axis_name="data", dtype="float32"), mesh).compile()
        >>> gc.testing.assert_wire(step, axis="data", at_most=500_000, dtypes="float32", kinds="all-reduce")

    Args:
        compiled: a compiled program, its HLO text, or the report of :func:`gradcomp_jax.wire_bytes`, which takes the number of
            turns of a loop and the branch of a conditional.
        axis: an axis of the mesh, or several. Collectives that run along one of them are looked at; by default all are.
        at_most: bytes that one device sends in one run.
        dtypes: dtypes that may cross, one or several, such as ``"bfloat16"`` or HLO's ``"bf16"``. An exchange of this package
            sends bfloat16 as uint16 where a collective only moves it.
        kinds: kinds of collectives that there may be, one or several, such as ``"all-reduce"``.
        mesh: the mesh that the program was compiled for. By default that of its arguments or results; a text does not say it.

    Raises:
        AssertionError: with a table of the collectives and their source lines, if the program sends something else.
        ValueError: if an argument is not known, if ``axis`` is given and no mesh is, or as :func:`gradcomp_jax.wire_bytes`.
    """
    limits = Limits.of(axis=axis, at_most=at_most, dtypes=dtypes, kinds=kinds)
    report = compiled
    if not isinstance(report, WireReport):
        report = wire_bytes(report, mesh=mesh_of(report) if mesh is None else mesh)
    elif mesh is not None:
        raise ValueError("a report has its axes already: pass mesh= to gradcomp_jax.wire_bytes")
    if faults := limits.faults(report):
        cells = limits.cells(report)
        columns = list(cells[0])
        words = {columns.index(name) for name in WORDS if name in columns}
        raise AssertionError("\n".join([*faults, *aligned([columns, *(list(row.values()) for row in cells)], words)]))
