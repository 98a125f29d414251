"""What a checkpoint says of itself: nothing is restored into what another method made, or with a bit that has flipped."""

import itertools
import json
import pathlib
import random
import sys
import warnings

import chex
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax.methods.registry import METHODS, register
from gradcomp_jax.training.checkpoint import DamagedCheckpointError
from gradcomp_jax.training.checkpoint_record import compare_makers

PARAMS = {"w": np.zeros((64, 48), np.float32), "b": np.zeros(8, np.float32)}
SEED = random.SystemRandom().randrange(2**32)

exchange = gc.exchange


def state_of(tx, seed: int = 0):
    """A state of one worker as NumPy arrays, without a program; numbers where it would be zeros."""
    rng = np.random.default_rng(seed)

    def fill(spec):
        drawn = rng.normal(size=spec.shape).astype(spec.dtype) if spec.dtype == np.float32 else 3
        return np.full(spec.shape, drawn, spec.dtype)

    return jax.tree.map(fill, {"params": PARAMS, "opt_state": jax.eval_shape(tx.init, PARAMS)})


def one(name: str, **options):
    return METHODS[name].build(axis_name=None, **options)


OTHERS = {
    "nesterov": (one("dgc"), one("dgc", nesterov=True), r"dgc\(nesterov=False\), .* into dgc\(nesterov=True\): build"),
    "topk-random_k": (one("topk_sgd"), one("random_k"), r"topk_sgd\(\), .* into random_k\(\)"),
    "fp8-int8": (one("fp8"), one("block_quantized"), r"fp8\(\), .* into block_quantized\(\)"),
    "terngrad-qsgd": (one("terngrad"), one("qsgd"), r"terngrad\(\), .* into qsgd\(\)"),
    "compressor": (
        exchange(gc.compressors.topk(0.01), axis_name=None),
        exchange(gc.compressors.random_k(0.01), axis_name=None),
        r"exchange\(compressor=TopK.*exchange\(compressor=RandomK.*compressor\.rescale=",
    ),
    "memory": (
        exchange(gc.compressors.topk(0.01), axis_name=None, memory=gc.memory.momentum_correction()),
        exchange(gc.compressors.topk(0.01), axis_name=None, memory=gc.memory.momentum_correction(nesterov=True)),
        r"exchange\(memory.nesterov=False\), .* into exchange\(memory.nesterov=True\)",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_state_of_another_method_is_refused_by_name(what: str, tmp_path) -> None:
    saver, other, sentence = OTHERS[what]
    state = state_of(saver)
    gc.save_checkpoint(tmp_path / "saved", state)
    like = state_of(other, 1)
    with pytest.raises(ValueError, match=f"was saved with {sentence}"):
        gc.restore_checkpoint(tmp_path / "saved", like)
    taken = gc.restore_checkpoint(tmp_path / "saved", like, check_method=False)
    for ours, theirs in zip(jax.tree.leaves(taken), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert jax.tree.structure(taken) == jax.tree.structure(like)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chex.assert_trees_all_equal(gc.restore_checkpoint(tmp_path / "saved", state_of(saver, 1)), state)


@pytest.mark.slow
def test_no_two_methods_share_a_state(tmp_path) -> None:
    # Two of the names are other forms of a method, whose states it may continue.
    made = {name: one(name) for name in METHODS if name not in ("dense_bf16", "topk_two_bits")}
    inner = {"method": gc.dgc(axis_name=None), "axis_name": None}
    made |= {
        "local_sgd": gc.local_sgd(**inner, every=4),
        "diloco": gc.diloco(**inner),
        "elastic": gc.elastic_average(**inner),
        "delayed": gc.delayed_average(**inner, delay=2),
    }
    for name, tx in made.items():
        gc.save_checkpoint(tmp_path / name, state_of(tx))
    for saved, other in itertools.permutations(made, 2):
        with pytest.raises(ValueError, match=r"was saved with|of another model"):
            gc.restore_checkpoint(tmp_path / saved, state_of(made[other]))


def test_a_checkpoint_older_than_an_option_has_its_default() -> None:
    """That of SparseLoCo, whose positions were not packed and whose means did not arrive late."""
    like = state_of(gc.sparse_loco(axis_name=None))
    later = {"delay", "compressor.pack_positions"}
    made = gc.checkpoint_metadata(like)["gradcomp_jax"]["record"]["made_by"]
    assert later <= {option for _, options in made for option in options}
    older = [[name, {k: v for k, v in dict(options).items() if k not in later}] for name, options in made]
    with pytest.warns(UserWarning, match=r"goes on with exchange\(compressor.pack_positions=True\)"):
        compare_makers(pathlib.Path("saved"), {"made_by": older}, like)
    with pytest.raises(ValueError, match=r"into OuterState\(delay=2\)"):
        compare_makers(pathlib.Path("saved"), {"made_by": older}, state_of(gc.sparse_loco(axis_name=None, delay=2)))


def test_a_checkpoint_with_the_numbers_of_a_default_is_of_the_default() -> None:
    """Earlier versions of block_quantized had 8 and 256 in place of None, and a user may write them."""
    numbers, default = one("block_quantized", bits=8, block=256), one("block_quantized")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for saved, like in itertools.permutations((numbers, default)):
            compare_makers(pathlib.Path("saved"), _record_of(state_of(saved)), state_of(like))
    for other in ({"block": 128}, {"format": "mxfp8"}):
        with pytest.raises(ValueError, match=r"block_quantized.*build the state with what wrote it"):
            compare_makers(
                pathlib.Path("saved"), _record_of(state_of(numbers)), state_of(one("block_quantized", **other))
            )


def divided(devices: int = 2, spec: PartitionSpec | None = None):
    """The state of a hierarchy, whose shapes do not say how the square matrix is divided."""
    square = {"w": np.zeros((64, 64), np.float32)}
    method = gc.topk_sgd(axis_name="slices", density=0.1, block=64)
    tx = gc.hierarchical(method, axis_name="slices", inner_axis_name="chips", param_specs={"w": spec})
    sizes = {"chips": devices, "slices": 8 // devices}
    init = tx.init
    for axis, size in sizes.items():
        init = jax.vmap(init, in_axes=None, axis_name=axis, axis_size=size)
    return jax.eval_shape(init, square)


@pytest.mark.parametrize(
    ("like", "sentence"),
    [
        ({"devices": 4}, r"shards\(devices=2\), .* into shards\(devices=4\)"),
        (
            {"spec": PartitionSpec(None, "chips")},
            r"shards\(sharded_dims=\(None\)\), .* into shards\(sharded_dims=\(1\)\)",
        ),
        ({"spec": PartitionSpec("chips")}, r"shards\(sharded_dims=\(None\)\), .* into shards\(sharded_dims=\(0\)\)"),
    ],
)
def test_another_division_among_devices_is_refused(like: dict, sentence: str) -> None:
    saved = _record_of(divided())
    with pytest.raises(ValueError, match=f"was saved with {sentence}: build"):
        compare_makers(pathlib.Path("saved"), saved, divided(**like))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_makers(pathlib.Path("saved"), saved, divided())


def test_a_checkpoint_older_than_divisions_is_taken() -> None:
    saved = _record_of(divided())
    older = {"made_by": [maker for maker in saved["made_by"] if maker[0] != "shards"]}
    assert len(older["made_by"]) == len(saved["made_by"]) - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_makers(pathlib.Path("saved"), older, divided(devices=4))


def _record_of(state) -> dict:
    filled = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    return gc.checkpoint_metadata(filled)["gradcomp_jax"]["record"]


def test_what_may_differ_is_told(tmp_path) -> None:
    gc.save_checkpoint(tmp_path / "saved", state_of(one("dgc", block=1024)))
    like = state_of(one("dgc", block=1024, density=0.01, momentum=0.5), 1)
    sentence = r"saved with dgc\(density=0.001, momentum=0.9\), and goes on with dgc\(density=0.01, momentum=0.5\)"
    with pytest.warns(UserWarning, match=sentence):
        gc.restore_checkpoint(tmp_path / "saved", like)


def test_a_method_says_which_of_its_options_may_change(monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "own", None)

    @register(kept="residual", momentum="after", collectives=("two_phase",), paper="", may_change=("pace",))
    def own(*, axis_name, density=0.5, pace=1.0, form="a"):
        return gc.exchange(gc.compressors.topk(density), axis_name=axis_name)

    saved, path = _record_of(jax.eval_shape(own(axis_name=None).init, PARAMS)), pathlib.Path("saved")
    with pytest.warns(UserWarning, match=r"goes on with own\(density=0.25, pace=2.0\)"):
        compare_makers(path, saved, jax.eval_shape(own(axis_name=None, density=0.25, pace=2.0).init, PARAMS))
    with pytest.raises(ValueError, match=r"into own\(form='b'\)"):
        compare_makers(path, saved, jax.eval_shape(own(axis_name=None, form="b").init, PARAMS))


def test_options_say_nothing_of_the_process_and_compile_nothing_anew() -> None:
    """No addresses, no values of arrays: the state of one goes into a program of the other."""
    calls = []

    def kept(_):
        calls.append(1)
        return True

    key = jax.random.key(0)
    txs = [gc.random_k(axis_name=None, density=0.5, key=key, mask=kept) for _ in range(2)]
    first, second = (jax.tree.structure(jax.eval_shape(tx.init, PARAMS)) for tx in txs)
    assert first == second and hash(first) == hash(second)
    options = dict(jax.eval_shape(txs[0].init, PARAMS).made_by.options)
    assert options["key"] == "an array" and options["mask"].endswith("kept") and "0x" not in str(options)
    update = jax.eval_shape(txs[0].update, PARAMS, jax.eval_shape(txs[0].init, PARAMS))
    assert jax.tree.structure(update[1]) == first


def test_a_rate_that_is_traced_is_an_option_too() -> None:
    tx = optax.inject_hyperparams(
        gc.dgc, static_args=("density", "nesterov", "masking", "momentum_correction", "exact")
    )(axis_name=None, momentum=0.9, density=0.5, clip_norm=1.0)
    (made,) = (
        node.made_by
        for node in jax.tree.leaves(jax.eval_shape(tx.init, PARAMS), is_leaf=lambda x: isinstance(x, gc.ExchangeState))
        if isinstance(node, gc.ExchangeState)
    )
    assert dict(made.options)["momentum"] == "an array" and dict(made.options)["density"] == "0.5"


def test_a_checkpoint_that_says_nothing_is_restored_with_a_warning(tmp_path) -> None:
    state = state_of(one("dgc"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
    with pytest.warns(UserWarning, match=r"does not say which method made it.*checkpoint_metadata.*restored unchecked"):
        restored = gc.restore_checkpoint(tmp_path / "saved", state_of(one("dgc"), 1))
    chex.assert_trees_all_equal(restored, state)


def flip(path: pathlib.Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: pathlib.Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


DAMAGE = {"a bit": flip, "cut": cut, "deleted": lambda path, rng: path.unlink()}


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def survives(folder: pathlib.Path, like, state) -> bool:
    """Whether a checkpoint is refused; what is restored is what was saved, bit for bit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            restored = gc.restore_checkpoint(folder, like)
    except (DamagedCheckpointError, FileNotFoundError) as error:
        assert "\n" not in str(error) and ("earlier checkpoint" in str(error) or "no checkpoint" in str(error))
        return False
    chex.assert_trees_all_equal(restored, state)
    return True


@pytest.mark.parametrize("how", [pytest.param("a bit", marks=pytest.mark.slow), "cut", "deleted"])
def test_damage_is_refused_or_of_nothing_that_matters(how: str, tmp_path, monkeypatch, caplog) -> None:
    """In every file, and for bits at many places, chosen by size. One sentence, and nothing else is printed."""
    print("seed", SEED)
    echoes: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", echoes.append)
    rng, state, folder = random.Random(SEED), state_of(one("dgc")), tmp_path / "saved"
    gc.save_checkpoint(folder, state)
    files, like = files_of(folder), state_of(one("dgc"), 1)
    places = files * (1 if how == "deleted" else 2)
    if how == "a bit":
        places += rng.choices(files, [path.stat().st_size for path in files], k=64)
    refused = 0
    for path in places:
        whole = path.read_bytes()
        DAMAGE[how](path, rng)
        refused += not survives(folder, like, state)
        path.write_bytes(whole)
    assert refused >= {"a bit": 40, "cut": 5, "deleted": 3}[how]
    assert survives(folder, like, state)
    assert not echoes and not [record for record in caplog.records if record.name == "asyncio"]


def test_an_array_that_differs_is_named(tmp_path) -> None:
    """Whatever happens between the array and the disk; also where Orbax sees nothing."""
    state = state_of(one("dgc"))
    wrong = jax.tree.map(np.copy, state)
    wrong["opt_state"][0].memory[0][0].velocity.value[1, 2] += 1
    metadata = gc.checkpoint_metadata(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", wrong, custom_metadata=metadata)
    with pytest.raises(
        DamagedCheckpointError, match=r"saved is damaged .*array 'opt_state/0/memory/0/0/velocity/value' differs"
    ):
        gc.restore_checkpoint(tmp_path / "saved", state)


@pytest.mark.parametrize("text", ["[", "[]", "{}", '{"custom_metadata": {"gradcomp_jax": 3}}', "[" * 100_000])
def test_a_record_that_cannot_be_read(text: str, tmp_path) -> None:
    state = state_of(one("dgc"))
    gc.save_checkpoint(tmp_path / "saved", state)
    (tmp_path / "saved" / "_CHECKPOINT_METADATA").write_text(text)
    if text == "{}":
        with pytest.warns(UserWarning, match="restored unchecked"):
            gc.restore_checkpoint(tmp_path / "saved", state)
    else:
        with pytest.raises(DamagedCheckpointError, match="saved is damaged"):
            gc.restore_checkpoint(tmp_path / "saved", state)


def test_the_steps_of_a_manager_say_it_too(tmp_path) -> None:
    state = state_of(one("topk_sgd"))
    metadata = gc.checkpoint_metadata(state)
    assert json.loads(json.dumps(metadata)) == metadata
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state), custom_metadata=metadata)
    with ocp.CheckpointManager(tmp_path / "several") as manager:
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"epoch": 1}))
        manager.save(2, args=items, custom_metadata=metadata)
    for folder in (tmp_path / "1", tmp_path / "several" / "2" / "state"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chex.assert_trees_all_equal(gc.restore_checkpoint(folder, state_of(one("topk_sgd"), 1)), state)
        with pytest.raises(ValueError, match=r"saved with topk_sgd\(\), and is to be restored into random_k"):
            gc.restore_checkpoint(folder, state_of(one("random_k")))
    largest = max(files_of(tmp_path / "1"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="is damaged"):
        gc.restore_checkpoint(tmp_path / "1", state)
