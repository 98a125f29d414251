"""The guides run as they are written: all code of a page in one go, and what the page says of it holds."""

import ast
import contextlib
import functools
import inspect
import io
import logging
import re
from pathlib import Path

import jax
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.methods.traffic import traffic_of
from tests.docs.test_method_pages import python_blocks

DOCS = Path(__file__).parents[2] / "docs"
OUTPUT = re.compile(r"<!-- output: .* -->\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| .*? \| `(gc\..*?)` \| .* \| .* \|$", re.MULTILINE)


# A reader's session is not strict about dtypes.
pytestmark = pytest.mark.standard_promotion


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


@functools.cache
def run(page: str) -> tuple[dict, list[str]]:
    """The names that a page's code leaves, and what each block printed."""
    names: dict = {"__name__": page}
    printed = []
    for block in python_blocks(text_of(page)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, f"docs/{page}.md", "exec"), names)
        printed.append(out.getvalue())
    return names, printed


@pytest.mark.slow
def test_when_not_to_compress() -> None:
    names, printed = run("when_not_to_compress")
    (output,) = OUTPUT.findall(text_of("when_not_to_compress"))
    assert output in printed, "\n".join(printed)
    verdicts = re.findall(r"  (do not compress|compress) ", output)
    assert set(verdicts) == {"compress", "do not compress"} and verdicts[0] == "do not compress"
    dense, int8 = names["sent"].values()
    assert int8 < dense


@pytest.mark.slow
def test_debugging() -> None:
    """Each check finds what it is there to find, and finds nothing where nothing is."""
    names, printed = run("debugging")
    first, finite, ratio, worse, wire, explained, reduced, *rest = printed
    pinned, asserted, disagree, _, refused, unrolled, memory, again = rest
    assert "exchange/memory_ratio" in first
    assert "skipped: 1\nparameters unchanged: True" in finite and "bad input: [0]" in finite
    assert ratio == "rises less and less: True\n"
    assert "equal at density 1: True" in worse
    assert "all-to-all" in wire and "a dense all-reduce in the program: False" in wire
    assert "| w2 | 64 x 8 | dense |" in explained
    assert "already reduced over 'data'" in reduced and "local_value_and_grad" in reduced
    # The first of two reports, and not that with the state's own shardings.
    assert (pinned.count("residuals cross"), pinned.count("total")) == (1, 2)
    assert pinned.splitlines()[-1].startswith("total")
    assert asserted.startswith("residuals cross: ") and asserted.count("  residuals  ") == 1
    assert disagree == "parameters differ by 0.0\n"
    donated, outside = refused.splitlines()
    assert "donated to an earlier step" in donated and "gradcomp_jax.init_state" in outside
    assert unrolled == "steps: 1\n"
    assert "temporaries:" in memory and again == ""
    # And the checks that found nothing do find it.
    copies = [jax.device_put(float(i), device) for i, device in enumerate(jax.devices()[:2])]
    lie = jax.make_array_from_single_device_arrays((), jax.NamedSharding(jax.make_mesh((2,), ("a",)), jax.P()), copies)
    assert names["disagreement"]({"w": lie}) == 1.0
    dense = gc.dense(axis_name="data")
    state, step = names["start"](dense)
    report = gc.wire_bytes(step.lower(state, names["batch"]).compile())
    assert max(row.operand_bytes for row in report.rows if row.kind == "all-reduce") >= names["model_bytes"] // 2


def test_every_sentence_that_debugging_explains_is_one_of_ours() -> None:
    table = text_of("debugging").partition("<!-- table: sentences -->\n")[2].partition("\n\n")[0]
    quoted = [re.match(r"\| `(.*?)` \|", row).group(1) for row in table.splitlines()[2:]]
    # A message may be cut into several literals.
    sources = (path.read_text() for path in Path(gc.__file__).parent.rglob("*.py"))
    said = "\n".join(re.sub(r'"\n\s*f?"', "", source) for source in sources)
    assert len(quoted) > 15 and [words for words in quoted if words not in said] == []


@pytest.mark.slow
def test_a_step_that_was_taken_before_compiles_nothing(caplog) -> None:
    names, _ = run("debugging")
    step, state = names["step"], names["state"]
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        step(state, names["batch"])
    assert "Compiling" not in caplog.text
    half = jax.tree.map(lambda leaf: leaf[:32], jax.device_get(names["batch"]))
    half = jax.device_put(half, gc.data_sharding(names["mesh"], axis_name="data"))
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        step(state, half)
    assert "Compiling" in caplog.text


@pytest.mark.slow
def test_recipes() -> None:
    names, printed = run("recipes")
    _, accumulated, mixed, transformer, _, _, plateau, muloco, clipped, _, frozen, _ = printed
    sends, others, mean = (float(line.split(":")[1]) for line in accumulated.splitlines())
    assert others < 100 < sends and mean == (sends + 3 * others) / 4
    assert "float32" in mixed
    rows = {line.split(" | ")[0].strip("| "): line for line in transformer.splitlines()}
    assert "BlockQuantized" in rows["embedding"] and "bits=8" in rows["embedding"]
    assert "BlockQuantized" in rows["layer_0/mlp"] and "bits=4" in rows["layer_0/mlp"]
    assert "| layer_0/norm | 64 | dense |" in transformer and "TopK" not in transformer
    assert frozen.startswith("unchanged: True")
    assert names["last"] < 1.0
    assert float(plateau.split()[3]) < 1
    assert names["evaluated"]["w1"].shape == (32, 64)
    loss, apart, sent = re.fullmatch(r"loss: (\S+) replicas apart by (\S+)\nbytes a step: (\S+)\n", muloco).groups()
    assert float(loss) < 0.7 and float(sent) < others + sends
    assert float(apart) == 0  # The last step is an outer one.
    norms = names["norms"]
    # A mean of clipped gradients is no longer than the bound; what is clipped after the mean is exactly as long.
    assert norms["after"] == pytest.approx(0.01, rel=1e-4) and norms["before"] < 0.01
    assert norms["local_clip"] == pytest.approx(norms["before"] / len(jax.devices()) ** 0.5, rel=0.05)
    assert all(line for line in clipped.splitlines())


@pytest.mark.slow
def test_fsdp() -> None:
    names, _ = run("fsdp")
    assert float(names["value"]) < float(names["metrics"]["loss"])
    assert names["base"]["up"].shape == (64, 512) and names["gradient"].shape == (3, 64, 64)
    assert abs(names["gradient"]).min() > 0


@pytest.mark.slow
def test_coming_from() -> None:
    names, printed = run("coming_from")
    _, _, _, begun = printed
    steps, dense, compressed = begun.split()
    assert int(steps) == 10 and float(compressed) < float(dense)
    assert names["loss_now"] < 1.0
    assert names["parts"](names["params"]) == {"w1": 0, "w2": 1}
    state = gc.init_state(names["params"], names["one_bit"], names["mesh"], axis_name="data")
    step = gc.make_train_step(names["loss"], names["one_bit"], names["mesh"], axis_name="data")
    state, first = step(state, names["batch"])
    _, second = step(state, names["batch"])
    assert 0 < float(second["loss"]) < float(first["loss"])


def table_of(name: str) -> str:
    """One of the tables of *Coming from elsewhere*."""
    return text_of("coming_from").partition(f"<!-- table: {name} -->\n")[2].partition("\n\n")[0]


def test_diloco_has_the_arguments_and_defaults_that_its_table_says() -> None:
    """Each argument of ours is the counterpart of something, and no other is named."""
    cells = [row.split(" | ")[2].removesuffix(" |") for row in table_of("diloco").splitlines()[2:]]
    said: dict[str, str] = {}
    for cell in cells:
        said |= {name: default for name, default in re.findall(r"`(\w+)`(?: \(([\d.]+)\))?", cell)}
    parameters = inspect.signature(gc.diloco).parameters
    assert set(said) == set(parameters)
    for name, default in said.items():
        assert default == ("" if parameters[name].default is inspect.Parameter.empty else str(parameters[name].default))


def test_one_bit_adam_has_the_arguments_and_defaults_that_its_table_says() -> None:
    """Each argument of ours has a row, and each name in backticks with a default is one."""
    cells = [row.split(" | ")[1].removesuffix(" |") for row in table_of("one_bit_adam").splitlines()[2:]]
    parameters = inspect.signature(gc.one_bit_adam).parameters
    said = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert said == set(parameters)
    defaults = {name: value for cell in cells for name, value in re.findall(r"`(\w+)` \((.*?)\)", cell)}
    for name, parameter in parameters.items():
        if name in defaults:
            assert ast.literal_eval(defaults[name]) == parameter.default
    assert {"b1", "b2", "eps", "floor", "block", "memory_dtype"} == set(defaults)


def test_every_hook_has_a_transformation_that_is_built() -> None:
    """The code in the table, which says itself what each sends."""
    table = table_of("hooks")
    expressions = ROW.findall(table)
    assert len(expressions) == table.count("| `gc.") >= 19
    shape = [jax.ShapeDtypeStruct((256, 256), "float32")]
    dense = gc.dense(axis_name="data")
    names = {"gc": gc, "dense": dense, "chain": optax.chain(dense, optax.sgd(0.1))}
    sent = {code: traffic_of(eval(code, names), shape, {"data": 8}).sent for code in expressions}
    most = sent['gc.dense(axis_name="data")']
    assert all(0 < value <= 1.01 * most for value in sent.values())
    assert sent['gc.powersgd(axis_name="data", rank=2)'] < most / 10
