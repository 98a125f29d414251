"""Vectors of all layers in one array are vectors: of a scan over layers, by their names, or by a hint."""

from typing import Any

import jax
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax.core.masks import by_leaf
from gradcomp_jax.core.matrix_view import is_vector
from gradcomp_jax.methods.registry import METHODS
from tests.conformance.environments import AXIS, vmapped

N, LAYERS, WIDTH = 4, 24, 256
slow = pytest.mark.slow


def mean_of(tx: Any, gradient: Any) -> Any:
    """What two steps of a method deliver in sum."""
    params = jax.tree.map(lambda g: g[0] * 0, gradient)
    state, update = vmapped(tx, params, N)
    total = params
    for _ in range(2):
        moved, state = update(gradient, state, params)
        total = jax.tree.map(lambda t, m: t + np.asarray(m)[0], total, moved)
    return total


@pytest.mark.parametrize(
    "name", ("terngrad", *(pytest.param(n, marks=slow) for n in ("dgc", "powersgd", "one_bit_adam")))
)
def test_a_stack_of_scales_is_updated_as_one_long_vector(name: str) -> None:
    """Whatever the method does to a vector, it does to the same numbers in a stack; matrices beside it are compressed."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(N, *shape)).astype(np.float32)  # noqa: E731
    scale = draw(LAYERS, WIDTH)
    gradient = {
        "layers": {"norm": {"scale": scale}, "attn_norm": {"weight": scale}, "kernel": draw(2, 64, 64)},
        "long": scale.reshape(N, -1),
    }
    # DGC sends vectors in bfloat16, and draws for each.
    options = {"dtype": "float32"} if name == "dgc" else {}
    moved = mean_of(METHODS[name].build(axis_name=AXIS, **options), gradient)
    long = moved["long"].reshape(LAYERS, WIDTH)
    assert long.any()
    np.testing.assert_allclose(moved["layers"]["norm"]["scale"], long, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(moved["layers"]["attn_norm"]["weight"], long, rtol=1e-6, atol=1e-7)


VECTORS = (
    "layers/attn_norm/scale",
    "h/ln_1/weight",
    "LayerNorm_0/scale",
    "blocks/ffnNorm",
    "attn/q_bias",
    "bn/g/value",
    "beta",
)
MATRICES = (
    "layers/kernel",
    "scale_embed",
    "lora/b",
    "lora_a",
    "norm/kernel",
    "relative_attention_bias/embedding",
    "w",
    "head/weight",
    "g",
)


def test_names_tell_vectors_from_matrices() -> None:
    assert all(is_vector(path) for path in VECTORS)
    assert not any(is_vector(path) for path in MATRICES)


def shapes(*paths: str, shape: tuple[int, ...] = (LAYERS, 1024)) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(shape, np.float32) for path in paths}


def test_every_mask_goes_by_the_names() -> None:
    tree = shapes("layers/scale", "layers/kernel", "lora/b")
    wanted = [True, False, True]
    masks = gc.masks
    int8, dense = gc.compressors.block_quantized(bits=8), gc.compressors.dense()
    for mask in (masks.at_least(0), masks.gains(int8, dense), masks.without("nothing"), masks.stacked({})):
        assert by_leaf(mask, tree) == wanted
    assert by_leaf(masks.at_least(0, ndim=1), tree) == [True, True, True]
    assert by_leaf(masks.stacked({"lora/": 1, "scale": 0}), tree) == [True, True, False]
    assert by_leaf(masks.stacked({"layers/": 1}), shapes("layers/a", "layers/w", shape=(LAYERS, 8, 8))) == [True, True]
    with pytest.raises(TypeError, match=r"layers must be a mapping or a function, such as \{'blocks/': 1\}"):
        masks.stacked(3)


def test_policies_by_shape_go_by_the_names_and_say_so() -> None:
    tree = shapes("layers/kernel", "layers/scale")
    code, dense = gc.compressors.block_quantized(bits=8), gc.compressors.dense()
    for policy in (
        gc.transforms.by_matrix(lambda r, c: code, dense=dense),
        gc.transforms.by_column(lambda c: code, dense=dense),
        gc.transforms.by_tensor(lambda n: code, dense=dense),
        gc.by_path("layers/", gc.transforms.by_matrix(lambda r, c: code, dense=dense)),
    ):
        kernel, scale = policy.explain(tree).splitlines()[-2:]
        assert "stacked vectors" not in kernel and "dense, stacked vectors" in scale
    # A mask, and a split, say what a name does not.
    policy = gc.transforms.by_matrix(lambda r, c: code, dense=dense, matrix={"scale": 0})
    assert policy.choose("layers/scale", tree["layers/scale"]) == code
    policy = gc.transforms.by_matrix(lambda r, c: code, dense=dense).masked()
    assert policy.choose("layers/scale", tree["layers/scale"]) == code
