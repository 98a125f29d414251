"""The tables of programs for TPU and GPU: what is counted in a program, and how rows are kept and compared."""

import dataclasses

import pytest

from benchmarks.compiled import model, passes, tables
from benchmarks.compiled.programs import INNER, OUTER, Topology, across
from gradcomp_jax.audit.report import CollectiveRow, WireReport

PROGRAM = """HloModule program

ENTRY main {
  x = f32[8] parameter(0)
  ROOT copied = f32[8] copy(x)
}
"""
ROW = passes.Row(passes=25.1, counted=30.2, kernels=67, temporaries=4.1, sent=1_000, seconds=30.0)
NOWHERE = Topology("nowhere", list, 1)


def test_kernels_of_pallas_read_their_operands_and_write_their_results() -> None:
    kernel = 'f32[2,8] custom-call(x, x), custom_call_target="tpu_custom_call"'
    other = 'f32[8] custom-call(x), custom_call_target="AllocateBuffer"'
    text = PROGRAM.replace("  ROOT", f"  twice = {kernel}\n  one = {other}\n  ROOT")
    assert passes.bytes_of_pallas(text) == 2 * 32 + 64
    assert passes.bytes_of_pallas(PROGRAM) == 0


def test_rows_that_are_kept_are_not_compiled_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (tree, *_), compiled = tmp_path / "rows.json", model.TREES, []
    monkeypatch.setattr(passes, "measure", lambda case, *_: compiled.append(case) or ROW)
    for _ in range(2):
        assert passes.Rows(str(path)).get("dgc", tree, NOWHERE) == ROW
    assert compiled == ["dgc"]
    assert passes.Rows(str(path)).kept("dense", tree, NOWHERE) is None


def test_only_what_differs_shows_the_figure_of_before() -> None:
    now = dataclasses.replace(ROW, passes=10.4, temporaries=0.26)
    assert tables.compared(now, ROW) == ["25.1 → 10.4", "30.2", "67", "4.10 → 0.26", "1,000", "30"]
    assert tables.compared(now, None) == ["10.4", "30.2", "67", "0.26", "1,000", "30"]


def row(kind: str, axis: tuple[str, ...]) -> CollectiveRow:
    sent = {"count": 1, "operand_bytes": 160, "sent_bytes": 100, "received_bytes": 100}
    return CollectiveRow(kind=kind, dtype="u8", axis=axis, group_size=16, name=kind, op_name="", groups=(), **sent)


def test_bytes_across_are_those_of_the_slow_axis() -> None:
    report = WireReport(
        (row("all-gather", (OUTER,)), row("all-to-all", (OUTER, INNER)), row("all-gather", (INNER,))), ()
    )
    assert across(report, 2) == 100 + 80
    with pytest.raises(ValueError, match="all-gather"):
        across(WireReport((row("all-gather", (OUTER, INNER)),), ()), 2)
