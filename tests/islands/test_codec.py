"""The host codec is the exchange's own format: the same bytes, and what a worker's payload decodes to there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import compressors
from gradcomp_jax.islands.host_codec import HEADER_BYTES
from tests.compressors.test_every_code import ALL
from tests.marks import slow_but

PARAMS = {"a": jnp.ones((20, 13)), "b": jnp.ones((35,)), "c": jnp.ones((5, 7, 4))}
# A sum of one, over one: the exchange divides where the others have nothing to divide.
ROUNDED = ("ternary", "ternary-downlink", "rotated-3")
QUICK = ("topk-packed", "int4", "random-k", "ternary-bucket", "low-rank")


@functools.cache
def made(name):
    code = ALL[name].compressor
    params = {"a": jnp.ones(code.row_shape), "b": jnp.ones(code.row_shape)} if code.row_shape else PARAMS
    codec = gc.islands.codec(code, params, mask=True)
    x = np.random.default_rng(3).normal(size=codec.size).astype(np.float32)
    if name.startswith("union"):
        x[np.random.default_rng(4).random(codec.size) > 0.1] = 0
    return params, codec, x, codec.encode(x, 5)


def exchanged(code, params, trees, **options):
    """The update of the exchange of one worker, or of several along an axis, in step 5."""
    axis = None if len(trees) == 1 else "i"
    tx = gc.exchange(code, axis_name=axis, memory=gc.memory.none(), **options)

    def update(tree):
        state = tx.init(params)._replace(step=jnp.int32(5))
        return tx.update(tree, state)[0]

    if axis is None:
        return jax.jit(update)(jax.tree.map(jnp.asarray, trees[0]))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    return jax.tree.map(lambda leaf: leaf[0], jax.jit(jax.vmap(update, axis_name=axis))(stacked))


EVERY = pytest.mark.parametrize("name", slow_but(set(QUICK), ALL))


@EVERY
def test_it_decodes_to_what_crosses(name: str) -> None:
    params, codec, x, data = made(name)
    update = codec.flat(exchanged(ALL[name].compressor, params, [codec.tree(x)], mask=True))
    decoded = codec.decode(data)
    np.testing.assert_allclose(decoded, update, atol=1e-6 if name in ROUNDED else 0)
    assert np.abs(decoded).max() > 0


@EVERY
def test_bytes_are_the_payload_and_a_header(name: str) -> None:
    params, codec, _, data = made(name)
    code = ALL[name].compressor
    rows = sum(gc.kernels.row_count(leaf.size, code.block) for leaf in params.values())
    assert len(data) == HEADER_BYTES + codec.payload_bytes
    assert codec.payload_bytes == code.payload_bytes(rows) + codec.side_bytes
    # What workers along an axis agree on is not in their payloads.
    assert (codec.side_bytes > 0) == (code.side_information in ("max", "mean"))


@pytest.mark.parametrize("name", slow_but(set(), ALL))
def test_no_compiler_changes_a_bit_of_what_it_decodes_to(name: str) -> None:
    """Operation by operation, where nothing is contracted, and in one program."""
    _, codec, _, data = made(name)
    with jax.disable_jit():
        alone = codec.decode(data)
    if codec.same_bits:
        np.testing.assert_array_equal(codec.decode(data), alone)
    else:
        assert name.startswith(("rotated", "frequencies", "low-rank"))


@EVERY
def test_other_bytes_are_refused_or_decode_to_a_vector(name: str) -> None:
    """Anybody may have written what is in a bucket: no bytes do harm, and the same bytes are the same vector."""
    _, codec, _, data = made(name)
    rng = np.random.default_rng(6)
    for _ in range(10):
        body = rng.integers(0, 256, codec.payload_bytes, dtype=np.uint8).tobytes()
        try:
            decoded = codec.decode(data[:HEADER_BYTES] + body)
        except ValueError as error:
            assert "not finite" in str(error)
            continue
        assert decoded.shape == (codec.size,) and np.isfinite(decoded).all()
        np.testing.assert_array_equal(decoded, codec.decode(data[:HEADER_BYTES] + body))


@pytest.mark.parametrize("name", ["topk-packed", "int4"])
def test_the_mean_of_two_is_that_of_two_workers(name: str) -> None:
    _, codec, x, data = made(name)
    y = np.float32(0.5) * x[::-1]
    mean = exchanged(ALL[name].compressor, PARAMS, [codec.tree(x), codec.tree(y)], mask=True, collective="all_gather")
    both = (codec.decode(data) + codec.decode(codec.encode(y, 5))) / np.float32(2)
    np.testing.assert_array_equal(both, codec.flat(mean))


def test_the_format_of_sparse_loco() -> None:
    """84 bytes a chunk of 4,096, small tensors whole, and what stays is what ``sparse_loco`` keeps."""
    params = {"kernel": jnp.ones((128, 64)), "bias": jnp.ones((64,))}
    code = compressors.topk(1 / 64, block=4096, bits=2, pack_positions=True)
    codec = gc.islands.codec(code, params)
    # Dealt out in an odd number of chunks, because two would divide the matrix's rows.
    assert codec.payload_bytes == 3 * 84 + 64 * 4
    tx = gc.sparse_loco(axis_name=None, every=1, learning_rate=1.0, decay=1.0)
    x = np.random.default_rng(0).normal(size=codec.size).astype(np.float32)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(zeros)
    _, state = jax.jit(tx.update)(jax.tree.map(lambda a: -jnp.asarray(a), codec.tree(x)), state, zeros)
    # The centre began at zero, and took one step of the whole distance against what was sent.
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), -codec.flat(state.centre))


def test_a_policy_and_leaves_that_go_dense() -> None:
    params = {"w": jnp.ones((64, 64)), "v": jnp.ones((128, 16)), "b": jnp.ones((3,)), "none": jnp.ones((0, 4))}
    policy = gc.by_path(
        "w", compressors.block_quantized(bits=8), otherwise=gc.by_path("v", compressors.topk(0.1), otherwise="dense")
    )
    codec = gc.islands.codec(policy, params)
    x = np.random.default_rng(0).normal(size=codec.size).astype(np.float32)
    decoded = codec.tree(codec.decode(codec.encode(x)))
    np.testing.assert_array_equal(decoded["b"], codec.tree(x)["b"])
    np.testing.assert_allclose(decoded["w"], codec.tree(x)["w"], atol=0.05)
    assert 0 < np.count_nonzero(decoded["v"]) < 0.2 * decoded["v"].size
    assert decoded["none"].shape == (0, 4)


def test_wrong_bytes_and_vectors_say_what_they_are() -> None:
    params, codec, x, data = made("int4")
    for bad, reason in [
        (b"", "not of this code"),
        (b"x" + data[1:], "not of this code"),
        (data[:8] + b"\0" * 16 + data[24:], "not of this code"),
        (data[:-1], "and this code's have"),
        (data + b"\0", "and this code's have"),
    ]:
        with pytest.raises(ValueError, match=reason):
            codec.decode(bad)
    nan = x.copy()
    nan[7] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        codec.encode(nan)
    with pytest.raises(ValueError, match=r"a vector is float32 \[435\], got float64"):
        codec.encode(x.astype(np.float64))
    with pytest.raises(ValueError, match="other shapes"):
        codec.flat({**params, "a": jnp.ones((13, 20))})
    with pytest.raises(TypeError, match="int32"):
        gc.islands.codec(ALL["int4"].compressor, {"n": jnp.ones((4, 4), jnp.int32)})


def test_configurations_have_different_digests() -> None:
    make = functools.partial(gc.islands.codec, mask=True)
    code = compressors.topk(0.1, block=13)
    others = [
        make(compressors.topk(0.2, block=13), PARAMS),
        make(compressors.topk(0.1, block=13, dtype=jnp.float32), PARAMS),
        make(code, PARAMS, view="rows"),
        make(code, PARAMS, key=1),
        make(code, {**PARAMS, "d": jnp.ones((2, 2))}),
        make(code, {"x" + name: leaf for name, leaf in PARAMS.items()}),
        gc.islands.codec(code, PARAMS, mask=False),
    ]
    digests = {codec.digest for codec in [make(code, PARAMS), *others]}
    assert len(digests) == len(others) + 1
    assert make(code, jax.tree.map(lambda a: a.astype(jnp.bfloat16), PARAMS)).digest in digests
