"""Policies: which compressor for which tensor, and what must be refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from tests.conformance.environments import vmapped

INT8 = gc.compressors.block_quantized(bits=8, block=64)
TOPK = gc.compressors.topk(0.05, block=64)
AXIS, N = "data", 4
SHAPES = {"embed": (50, 64), "head": (64, 10), "norm": (64,), "tail": (7,)}


def params():
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal((N, *shape)), np.float32) for name, shape in SHAPES.items()}


def run(tx, gradient=None):
    state, update = vmapped(tx, params(), N)
    return update(gradients() if gradient is None else gradient, state, params())


def test_by_size_takes_the_largest_bound_reached() -> None:
    policy = gc.by_size({0: "dense", 600: TOPK, 3200: INT8})
    chosen = {name: policy.choose(name, jax.ShapeDtypeStruct(shape, jnp.float32)) for name, shape in SHAPES.items()}
    assert chosen == {"embed": INT8, "head": TOPK, "norm": "dense", "tail": "dense"}


def test_each_tensor_goes_through_its_own_compressor() -> None:
    """The residuals show it: rounding's is small everywhere, a selection's is most of the tensor, dense has none."""
    policy = gc.by_path(r"embed", TOPK, otherwise=gc.by_size({0: "dense", 100: INT8}))
    gradient = gradients()
    updates, state = run(gc.exchange(policy, axis_name=AXIS, collective="all_gather"), gradient)
    residuals = {np.shape(m)[-2:]: np.asarray(m) for m in jax.tree.leaves(state.memory)}
    assert set(residuals) == {(50, 64), (10, 64)}
    size = {name: np.linalg.norm(np.asarray(g)) for name, g in gradient.items()}
    assert 0.5 < np.linalg.norm(residuals[50, 64]) / size["embed"] < 1
    assert 0 < np.linalg.norm(residuals[10, 64]) / size["head"] < 0.02
    for name in ("norm", "tail"):
        np.testing.assert_allclose(updates[name][0], np.mean(gradient[name], axis=0), atol=1e-6)


def test_averaged_tensors_pass_through() -> None:
    gradient = gradients()
    mean = np.broadcast_to(np.mean(gradient["head"], axis=0), gradient["head"].shape)
    tx = gc.exchange(gc.by_path("head", "averaged", otherwise=gc.by_size({0: "dense", 100: INT8})), axis_name=AXIS)
    updates, state = run(tx, gradient | {"head": mean})
    np.testing.assert_array_equal(updates["head"], mean)
    assert [np.shape(m)[-2:] for m in jax.tree.leaves(state.memory)] == [(50, 64)]


def test_a_bad_averaged_tensor_skips_the_exchange() -> None:
    gradient = gradients()
    bad = np.broadcast_to(np.mean(gradient["head"], axis=0), gradient["head"].shape).copy()
    bad[:, 3, 3] = np.nan
    tx = gc.exchange(gc.by_path("head", "averaged", otherwise=gc.by_size({0: "dense", 100: INT8})), axis_name=AXIS)
    updates, state = run(tx, gradient | {"head": bad})
    assert int(state.skipped) == 1
    assert not any(np.asarray(u).any() for u in updates.values())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: gc.by_path("embed", TOPK), "by_path('embed', ...) has no rule for 'head'; pass otherwise='dense'"),
        (lambda: gc.by_size({100: INT8}), "by_size has no rule for 'norm' with 64 entries: its rules begin at 100"),
    ],
)
def test_a_tensor_without_a_rule_is_an_error(policy, message) -> None:
    tx = gc.exchange(policy(), axis_name=AXIS)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(tx.init, params())


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: gc.by_size({}), ValueError, "at least one rule"),
        (lambda: gc.by_size({-1: "dense"}), ValueError, "must be finite and at least 0, got -1"),
        (lambda: gc.by_size({0: "sparse"}), TypeError, "'dense', 'averaged' or a policy, got 'sparse'"),
        (lambda: gc.by_path("(", TOPK), ValueError, "must be a regular expression, got '('"),
        (lambda: gc.by_path("a", None), TypeError, "got None"),
        (lambda: gc.exchange(gc.by_size({0: INT8}), axis_name=AXIS, mask=True), ValueError, "leave mask= out"),
        (
            lambda: gc.exchange(gc.by_size({0: INT8}), axis_name=AXIS, collective="all_reduce"),
            ValueError,
            "collective='all_reduce' needs payloads that add up",
        ),
        (
            lambda: gc.exchange(gc.compressors.dense("bfloat16"), axis_name=AXIS, collective="all_reduce"),
            ValueError,
            "a sum of bfloat16 numbers rounds, and no memory keeps what it loses; use collective='two_phase'",
        ),
        (
            lambda: gc.exchange(gc.qsgd, axis_name=AXIS),
            TypeError,
            "got the function qsgd: write gradcomp_jax.compressors.topk(0.01)",
        ),
        (lambda: gc.exchange(INT8, axis_name=AXIS, view="diagonal"), ValueError, "view must be one of 'rows'"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(build, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        build()


def test_columns_are_not_cut_across() -> None:
    tx = gc.exchange(
        INT8, axis_name=AXIS, view="columns", mask={"embed": True, "head": False, "norm": False, "tail": False}
    )
    with pytest.raises(ValueError, match=r"divides 'embed' of shape .* into columns"):
        jax.eval_shape(tx.init, params())


def compressed(mask) -> list[str]:
    """Returns which tensors have a residual: those that go dense in float32 have none."""
    tx = gc.exchange(INT8, axis_name=None, mask=mask)
    sizes = sorted(m.value.size for m in jax.tree.leaves(jax.eval_shape(tx.init, params()).memory, is_leaf=is_marked))
    return [name for name, shape in SHAPES.items() if -(-np.prod(shape) // 64) * 64 in sizes]


def is_marked(node) -> bool:
    return isinstance(node, gc.PerDevice)


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (None, ["embed", "head"]),
        (False, []),
        ({"embed": True, "head": False, "norm": np.False_, "tail": False}, ["embed"]),
        (lambda tree: jax.tree.map(lambda p: p.ndim >= 2, tree), ["embed", "head"]),
        (gc.masks.at_least(700), ["embed"]),
        (gc.masks.at_least(7, ndim=2), ["embed", "head"]),
        (gc.masks.without("^head"), ["embed"]),
        (gc.masks.without("embed", gc.masks.at_least(0, ndim=2)), ["head"]),
        (gc.masks.without("embed", {"embed": True, "head": True, "norm": False, "tail": False}), ["head"]),
    ],
)
def test_masks_choose_what_is_compressed(mask, wanted) -> None:
    assert compressed(mask) == wanted


def test_a_mask_may_be_a_prefix_and_its_exchange_may_be_masked() -> None:
    tree = {"encoder": params(), "head": {"kernel": jnp.ones((64, 64))}}
    tx = gc.exchange(INT8, axis_name=None, mask={"encoder": False, "head": True})
    inside = optax.masked(tx, {"encoder": True, "head": False})
    assert len(jax.tree.leaves(jax.eval_shape(tx.init, tree).memory)) == 1
    assert not jax.tree.leaves(jax.eval_shape(inside.init, tree).inner_state.memory)


def test_a_mask_replaces_the_rule_of_a_policy_by_shape() -> None:
    """Rank 16 of a [16, 16] matrix gains nothing, and goes dense until a mask says otherwise."""
    tree = {"kernel": jnp.ones((16, 16)), "bias": jnp.ones(16)}
    memory = [jax.eval_shape(gc.powersgd(axis_name=None, rank=16, mask=m).init, tree).memory for m in (None, True)]
    assert [len(jax.tree.leaves(m)) for m in memory] == [0, 1]


def test_blocks_that_are_dealt_out_may_be_one_more_than_hold_a_tensor() -> None:
    """Four blocks of 81% would be fewer bytes than the tensor, the five that are sent are not."""
    code, tree = gc.compressors.topk(0.81), {"kernel": jnp.ones((64, 64))}
    assert 4 * code.payload_bytes(1) < 4 * 64 * 64 < 5 * code.payload_bytes(1)
    assert f"| {5 * code.payload_bytes(1):,} |" in gc.by_path("", code).explain(tree)
    assert not jax.tree.leaves(jax.eval_shape(gc.exchange(code, axis_name=None).init, tree).memory)


@pytest.mark.parametrize(
    "mask", [{"embed": True}, [True], {**dict.fromkeys(SHAPES, True), "tail": 1}, lambda tree: tree, "embed"]
)
def test_a_mask_of_another_structure_is_refused(mask) -> None:
    with pytest.raises(ValueError, match="mask must be a tree of booleans, with the structure of the parameters"):
        jax.eval_shape(gc.exchange(INT8, axis_name=None, mask=mask).init, params())


def test_a_mask_that_is_no_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a regular expression"):
        gc.masks.without("(")


def test_a_policy_explains_itself() -> None:
    policy = gc.by_path(
        "embed", TOPK, otherwise=gc.by_path("tail", "averaged", otherwise=gc.by_size({0: "dense", 600: INT8}))
    )
    lines = policy.explain({**params(), "none": None}).splitlines()
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])}
    # Dealt out over 51 blocks: of 50 each would have all its entries in few columns.
    assert cells["embed"] == ["50 x 64", str(TOPK), f"{TOPK.payload_bytes(51):,}"]
    assert cells["head"] == ["64 x 10", str(INT8), "680"]
    assert cells["norm"] == ["64", "dense", "256"]
    assert cells["tail"] == ["7", "averaged", "0"]
    assert len(cells) == len(SHAPES)
    with pytest.raises(ValueError, match="no rule for 'head'"):
        gc.by_path("embed", TOPK).explain(params())


def test_a_pattern_that_no_path_matches_warns() -> None:
    misspelt = gc.by_size({0: gc.by_path("haed", INT8, otherwise="dense")})
    with pytest.warns(UserWarning, match=r"pattern 'haed' .* none of the 4 tensors' paths.*explain"):
        gc.exchange(misspelt, axis_name=None).init(params())


def test_patterns_that_match_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    gc.exchange(gc.by_path("^head", INT8, otherwise="dense"), axis_name=None).init(params())
    assert not recwarn.list
