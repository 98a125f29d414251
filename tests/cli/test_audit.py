"""``gradcomp audit``: a text and a function of one's own, its exit codes, and what each mistake is told."""

import os
import textwrap

import pytest

pytest.importorskip("typer")

GROUPS = "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"
TEXT = f"""\
HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[4096]) -> f32[4096] {{
  %x = f32[4096] parameter(0)
  %loss = f32[] constant(0)
  %mean = f32[] all-reduce(%loss), {GROUPS}, metadata={{op_name="pmean" source_file="SRC/train.py" source_line=30}}
  ROOT %r = f32[4096] all-reduce(%x), {GROUPS}, metadata={{op_name="psum" source_file="SRC/train.py" source_line=12}}
}}
"""
SENT = 2 * 3 * 4096
MODULE = """
    import jax, jax.numpy as jnp

    def step(x):
        return jax.lax.psum(x.astype(jnp.float16), "data")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    jitted = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))
    x = jax.ShapeDtypeStruct((8, 4096), jnp.float32)

    def called():
        return jitted, (x,)

    def lowered():
        return jitted.lower(x)

    def compiled():
        return jitted.lower(x).compile()

    def nothing():
        return 3

    def fails():
        return jitted, (x, x)
"""


@pytest.fixture
def text(tmp_path):
    (tmp_path / "step.hlo").write_text(TEXT.replace("SRC", os.fspath(tmp_path)))


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_step.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.delitem(__import__("sys").modules, "own_step", raising=False)


def test_a_text_has_a_line_for_each_collective(gradcomp, text) -> None:
    result = gradcomp("audit", "step.hlo")
    assert result.exit_code == 0, result.stderr
    header, _, reduced, mean, total, note = result.stdout.splitlines()
    assert header.split() == ["axis", "kind", "dtype", "devices", "count", "bytes", "sent", "line"]
    assert reduced.split() == ["{0,1,2,3},", "{4,5,6,7}", "all-reduce", "f32", "4", "1", f"{SENT:,}", "train.py:12"]
    assert mean.split()[-2:] == ["6", "train.py:30"]
    assert total == f"one device sends {SENT + 6:,} bytes"
    assert note.startswith("The program does not name its axes") and "--mesh" in note


LIMITS = [
    (("--expect-dtype", "float32"), None),
    (("--expect-dtype", "bf16"), f"dtype f32: {SENT + 6:,} bytes; expected bf16"),
    (("--expect-dtype", "bf16,u16", "--on", "model"), f"dtype f32: {SENT + 6:,} bytes; expected bf16 or u16"),
    (("--expect-dtype", "bf16", "--on", "data"), None),
    (("--expect-kind", "all-gather"), f"kind all-reduce: {SENT + 6:,} bytes; expected all-gather"),
    (("--at-most", "25kB"), None),
    (("--at-most", "20kB"), f"one device sends {SENT + 6:,} bytes; expected at most 20,000"),
]


@pytest.mark.parametrize(("words", "fault"), LIMITS, ids=lambda part: " ".join(part) if isinstance(part, tuple) else "")
def test_a_broken_limit_is_exit_code_3(gradcomp, text, words, fault) -> None:
    result = gradcomp("audit", "step.hlo", "--mesh", "data=2,model=4", *words)
    assert result.exit_code == (0 if fault is None else 3), result.output
    faults = [line for line in result.stdout.splitlines() if line.startswith("not as expected: ")]
    assert faults == ([] if fault is None else [f"not as expected: {fault}"])
    assert "does not name its axes" not in result.stdout
    assert ("breaks" in result.stdout) == (fault is not None and "at most" not in fault)


@pytest.mark.parametrize(
    "name",
    [pytest.param("called", marks=pytest.mark.slow), pytest.param("lowered", marks=pytest.mark.slow), "compiled"],
)
def test_a_function_of_ones_own_has_its_mesh(gradcomp, module, name: str) -> None:
    sent = 2 * 7 * 4096 * 2 // 8
    result = gradcomp("audit", f"own_step:{name}", "--on", "data", "--expect-dtype", "f16", "--at-most", f"{sent}B")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[2].split()[:6] == ["data", "all-reduce", "f16", "8", "1", f"{sent:,}"]


def test_a_text_of_an_earlier_stage_says_so(gradcomp, tmp_path) -> None:
    (tmp_path / "before.txt").write_text(TEXT.replace(", is_scheduled=true", ""))
    result = gradcomp("audit", "before.txt", "--mesh", "data=2,model=4")
    assert result.exit_code == 0
    assert "not of a program that is ready to run" in result.stdout and "after_optimizations" in result.stdout


def test_a_program_that_sends_nothing(gradcomp, tmp_path) -> None:
    (tmp_path / "still.hlo").write_text(
        "HloModule m, is_scheduled=true\n\nENTRY e {\n  ROOT x = f32[2] parameter(0)\n}\n"
    )
    result = gradcomp("audit", "still.hlo", "--at-most", "1B", "--expect-kind", "all-gather")
    assert (result.exit_code, result.stdout) == (0, "one device sends 0 bytes\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("nothing.hlo",),
            "cannot read nothing.hlo: No such file or directory; a function of yours is MODULE:FUNCTION",
        ),
        (("binary",), "binary is no text: dump HLO with --xla_dump_hlo_as_text"),
        (("empty",), "empty: no ENTRY computation found"),
        (("step.hlo", "--on", "data"), "step.hlo: the program does not say where 'data' is: give --mesh, the mesh"),
        (("step.hlo", "--mesh", "data=2,model=4", "--on", "modle"), "did you mean 'model'"),
        (("step.hlo", "--mesh", "data=2"), "mesh has 2 devices but the program runs on 8"),
        (("step.hlo", "--mesh", "data"), "--mesh must be axes and their sizes, such as data=4,model=2, got 'data'"),
        (("step.hlo", "--at-most", "many"), "--at-most must be a number with B"),
        (("step.hlo", "--expect-dtype", "half"), "unknown dtype 'half'"),
        (("step.hlo", "--expect-kind", "all-sum"), "unknown kind 'all-sum'"),
        (("own_step:none",), "unknown name in own_step 'none'"),
        (("no_module:f",), "PROGRAM no_module:f: there is no module no_module in"),
        (("own_step:nothing",), "own_step:nothing must return a compiled program"),
        (("own_step:jitted",), "own_step:jitted must return a compiled program"),
        (("own_step:fails",), "own_step:fails: "),
        (("loop.hlo",), "communicates, and the program does not tell how often it runs: pass --trip-count"),
    ],
    ids=lambda part: part[-1] if isinstance(part, tuple) else "",
)
def test_a_mistake_is_one_sentence_and_exit_code_2(gradcomp, tmp_path, text, module, words, message) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("module @jit_f {}")
    (tmp_path / "loop.hlo").write_text(
        f"HloModule m, num_partitions=8\n\nc {{\n  p = f32[4] parameter(0)\n  ROOT b = pred[] custom-call(p)\n}}\n\n"
        f"d {{\n  q = f32[4] parameter(0)\n  ROOT r = f32[4] all-reduce(q), {GROUPS}\n}}\n\n"
        "ENTRY e {\n  x = f32[4] parameter(0)\n  ROOT w = f32[4] while(x), condition=c, body=d\n}\n"
    )
    result = gradcomp("audit", *words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("gradcomp: ") and message in line
