"""The models whose programs are compiled: a small one for train steps, and large gradient trees for memory passes."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from gradcomp_jax.planning import MODELS

Shapes = dict[str, jax.ShapeDtypeStruct]

WIDTH, HIDDEN, BLOCKS, CLASSES = 512, 1024, 1, 256
BATCH = 8  # of one device


def parameters() -> Shapes:
    """A residual block and a classifier: 1.2 million float32 values, three matrices and two vectors."""
    shapes: dict[str, tuple[int, ...]] = {"head": (WIDTH, CLASSES)}
    for block in range(BLOCKS):
        shapes[f"scale{block}"], shapes[f"bias{block}"] = (WIDTH,), (HIDDEN,)
        shapes[f"up{block}"], shapes[f"down{block}"] = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def loss(params: Mapping[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Cross-entropy of the network's classes."""
    x, labels = batch
    for block in range(BLOCKS):
        normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params[f"scale{block}"]
        x = x + jax.nn.relu(normal @ params[f"up{block}"] + params[f"bias{block}"]) @ params[f"down{block}"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels).mean()


def batch_shapes(workers: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The global batch."""
    rows = workers * BATCH
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)


def gradient_bytes(tree: Shapes | None = None) -> int:
    """Bytes of one gradient of a tree (default: :func:`parameters`) in its own dtypes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (tree or parameters()).values())


VOCABULARY, MODEL, FEED_FORWARD, LAYERS = 32_000, 1024, 2816, 4


def llama_like(dtype: str) -> Shapes:
    """A language model of 82 million values: few large leaves, vectors, and shapes that no block divides."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, MODEL), "norm": (MODEL,), "head": (MODEL, 256)}
    for layer in range(LAYERS):
        shapes[f"{layer}/query_key_value"], shapes[f"{layer}/out"] = (MODEL, 3 * MODEL), (MODEL, MODEL)
        shapes[f"{layer}/gate_up"], shapes[f"{layer}/down"] = (MODEL, 2 * FEED_FORWARD), (FEED_FORWARD, MODEL)
        shapes[f"{layer}/norm_attention"] = shapes[f"{layer}/norm_feed_forward"] = (MODEL,)
    shapes |= {"odd": (1000, 333), "odd_vector": (77_777,), "odd_box": (7, 129, 65)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in shapes.items()}


def few_leaves() -> Shapes:
    """Four leaves, two of which no block divides: every method's program is compiled in seconds, or a minute."""
    shapes = {
        "up": (MODEL, 2 * FEED_FORWARD),
        "down": (FEED_FORWARD, MODEL),
        "odd": (1000, 333),
        "odd_vector": (77_777,),
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def square() -> Shapes:
    """One leaf four blocks wide."""
    return {"square": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}


TREES: dict[str, Callable[[], Shapes]] = {
    "Few leaves, float32": few_leaves,
    "One square leaf, float32": square,
    "LLaMA-like, float32": lambda: llama_like("float32"),
    "LLaMA-like, bfloat16": lambda: llama_like("bfloat16"),
    "ResNet-50, float32": MODELS["resnet50"],
}
