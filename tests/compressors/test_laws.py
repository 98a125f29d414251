"""What every compressor promises, whatever its format."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import compressors
from gradcomp_jax.compressors import Compressor, RowInfo
from gradcomp_jax.compressors.ternary import Levels

ROWS = 6
SEEDED = ("seeds", "worker_seeds")


class Case(NamedTuple):
    """``row_bytes``: payload bytes of a row, counted by hand."""

    compressor: Compressor
    row_bytes: int


def ternary(**options: Any) -> Compressor:
    return compressors.ternary(**{"bucket_size": 13, **options})


CASES = {
    "dense": Case(compressors.dense(), 4),
    "dense-bf16": Case(compressors.dense(jnp.bfloat16), 2),
    # 13 trits are 3 bytes; a scale is 4 and absent where it is side.
    "ternary": Case(ternary(), 3),
    "ternary-bucket": Case(ternary(granularity="bucket"), 3),
    "ternary-int8": Case(ternary(packing="int8"), 13),
    "ternary-downlink": Case(ternary(downlink="ternary"), 3),
    "ternary-own": Case(ternary(share_scale=False, downlink="ternary"), 3 + 4),
    "ternary-own-bucket": Case(ternary(share_scale=False, downlink="ternary", granularity="bucket"), 3 + 4),
    "levels": Case(ternary().downlink(8), 2 * 4),  # base 17: seven digits a word
    "topk-1": Case(compressors.topk(0.1, block=13), 1 + 2),
    "topk-3-f32": Case(compressors.topk(0.25, block=13, dtype=jnp.float32), 3 * (1 + 4)),
    "topk-3-int8": Case(compressors.topk(0.25, block=13, dtype=jnp.int8), 3 * (1 + 1) + 4),
    "topk-all": Case(compressors.topk(1.0, block=13, dtype=jnp.float32), 13 * (1 + 4)),
    "topk-wide": Case(compressors.topk(0.01, block=257), 3 * (2 + 2)),
    "topk-packed": Case(
        compressors.topk(0.01, block=300, pack_positions=True), 3 + 1 + 3 * 2
    ),  # 9 bits: what is above the bytes in one
    "int8": Case(compressors.block_quantized(block=13), 13 + 4),
    "int4": Case(compressors.block_quantized(bits=4, block=13), 7 + 4),
    "int2-stochastic": Case(compressors.block_quantized(bits=2, block=13, stochastic=True), 4 + 4),
    "int8-stochastic": Case(compressors.block_quantized(block=13, stochastic=True), 13 + 4),
}
EVERY = pytest.mark.parametrize("name", CASES)


@functools.partial(jax.jit, static_argnums=0)
def encode(compressor: Compressor, rows, key, count, statistic=None, side=None):
    return compressor.encode(rows, compressor.init((rows.size,)), RowInfo(count, key, statistic, side))[0]


@functools.partial(jax.jit, static_argnums=0)
def statistic_of(compressor: Compressor, rows, count):
    return compressor.statistic(rows, RowInfo(count))


@functools.partial(jax.jit, static_argnums=0)
def decode(compressor: Compressor, payload, side=None):
    return compressor.decode(payload, RowInfo(side=side))


@functools.partial(jax.jit, static_argnums=0)
def reduce(compressor: Compressor, payloads, side=None):
    return compressor.reduce(payloads, RowInfo(side=side))


def gradient(compressor: Compressor, seed: int = 0, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, compressor.block)).astype(np.float32)


def full(rows: np.ndarray) -> np.ndarray:
    return np.full(rows.shape[0], rows.shape[1], np.int32)


def side_of(compressor: Compressor, *workers: np.ndarray) -> np.ndarray | None:
    """The scale that these workers agree on, one for each row."""
    if isinstance(compressor, Levels):
        return np.full(workers[0].shape[0], 0.75, np.float32)
    measured = [statistic_of(compressor, w, full(w)) for w in workers]
    if measured[0] is None:
        return None
    return np.broadcast_to(np.max(np.stack(measured), axis=0), workers[0].shape[:1])


@functools.partial(jax.jit, static_argnums=0)
def both_ways(compressor: Compressor, rows, seed=0, count=None):
    """Payload, whether all is finite, what is decoded and where, as for the one worker of an exchange."""
    count = full(rows) if count is None else count
    state = compressor.init((rows.size,))
    statistic = compressor.statistic(rows, RowInfo(count), state)
    side = compressor.from_mean(statistic) if compressor.side_information == "mean" else statistic
    if compressor.side_information == "max":
        side = jnp.broadcast_to(statistic, rows.shape[:1])
    if isinstance(compressor, Levels):
        side = jnp.full(rows.shape[:1], 0.75)
    if compressor.side_information in SEEDED:
        side = compressor.side_of(gc.kernels.row_seeds(jax.random.key(seed), rows.shape[0]), 1)
    info = RowInfo(count, jax.random.fold_in(jax.random.key(1), seed), statistic, side)
    payload, _ = compressor.encode(rows, state, info)
    finite = compressor.finite(payload, statistic)
    return payload, finite, compressor.decode(payload, info), compressor.sent_mask(payload, info)


def round_trip(compressor: Compressor, rows: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.asarray(both_ways(compressor, rows, seed)[2])


def assert_same(a: Any, b: Any) -> None:
    chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize("name", ("dense-bf16", "levels", "topk-3-int8", "topk-packed", "int4"))
def test_rows_are_encoded_by_themselves(name: str) -> None:
    compressor = CASES[name].compressor
    x = gradient(compressor)
    side = side_of(compressor, x)
    whole = encode(compressor, x, jax.random.key(0), full(x), side=side)
    halves = [
        encode(compressor, x[s], jax.random.key(1), full(x[s]), side=None if side is None else side[s])
        for s in (slice(0, 3), slice(3, 6))
    ]
    assert_same(whole, jax.tree.map(lambda *a: np.concatenate(a), *halves))
    order = np.random.default_rng(1).permutation(ROWS)
    whole = jax.tree.map(np.asarray, whole)
    mixed = encode(compressor, x[order], jax.random.key(2), full(x), side=None if side is None else side[order])
    assert_same(mixed, jax.tree.map(lambda a: a[order], whole))


@pytest.mark.parametrize("name", ("ternary-int8", "ternary-own-bucket"))
def test_ternary_rows_are_encoded_by_themselves(name: str) -> None:
    """With the statistics of the whole tensor given, rows of entries that are certain do not depend on the draw."""
    compressor = CASES[name].compressor
    trits = np.random.default_rng(0).integers(-1, 2, (ROWS, 13))
    trits[:, 0] = 1
    x = (trits * np.float32(0.3)).astype(np.float32)
    bound = np.full(ROWS, 0.3, np.float32)
    whole = encode(compressor, x, jax.random.key(0), full(x), bound, bound)
    halves = [
        encode(compressor, x[s], jax.random.key(1), full(x[s]), bound[s], bound[s]) for s in (slice(3), slice(3, 6))
    ]
    assert_same(whole, jax.tree.map(lambda *a: np.concatenate(a), *halves))
    np.testing.assert_array_equal(decode(compressor, whole, bound), x)
    # The hash of the first rows of a tensor is that of the tensor: any entries, one key.
    y = gradient(compressor)
    bound = np.full(ROWS, 2.0, np.float32)
    one = encode(compressor, y, jax.random.key(5), full(y), bound, bound)
    part = encode(compressor, y[:3], jax.random.key(5), full(y)[:3], bound[:3], bound[:3])
    assert_same(jax.tree.map(lambda a: np.asarray(a)[:3], one), part)


@pytest.mark.parametrize(
    "compressor",
    [
        compressors.dense(jnp.bfloat16),
        compressors.ternary(),
        compressors.topk(1e-3),
        pytest.param(compressors.block_quantized(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_reduce_needs_no_dense_copy_for_each_worker(compressor: Compressor) -> None:
    """Fourteen workers more take less than a quarter of one dense copy."""
    rows = 2**20 // compressor.block

    def encoded(x, side):
        count = np.zeros(rows, np.int32)
        return compressor.encode(x, (), RowInfo(count, jax.random.key(0), side, side))[0]

    side = jax.ShapeDtypeStruct((rows,), jnp.float32)
    spec = jax.eval_shape(encoded, jax.ShapeDtypeStruct((rows, compressor.block), jnp.float32), side)

    def temporaries(workers: int) -> int:
        stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((workers, *a.shape), a.dtype), spec)
        return reduce.lower(compressor, stacked, side).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) <= temporaries(2) + 2**20


@pytest.mark.parametrize(
    "name", ("dense", "dense-bf16", "ternary", "ternary-own-bucket", "topk-1", "topk-all", "int8", "int8-stochastic")
)
def test_flags_say_what_the_code_does(name: str) -> None:
    compressor = CASES[name].compressor
    x = gradient(compressor)
    got = round_trip(compressor, x)
    assert np.array_equal(got, x) == (compressor.lossless or name == "topk-all")
    zeros_among = (got == 0).any()
    assert not compressor.is_sparsifier or zeros_among or name == "topk-all"
    if compressor.unbiased and not compressor.lossless:
        assert not np.array_equal(got, round_trip(compressor, x, seed=1))
    elif not name.startswith("ternary"):
        np.testing.assert_array_equal(got, round_trip(compressor, x, seed=1))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compressor.summable])
def test_summable_payloads_add_up(name: str) -> None:
    compressor = CASES[name].compressor
    # Integers: exact in every dtype.
    xs = [np.random.default_rng(i).integers(-1, 2, (ROWS, compressor.block)).astype(np.float32) for i in range(5)]
    one = np.ones(ROWS, np.float32)
    payloads = [encode(compressor, x, jax.random.key(i), full(x), one, one) for i, x in enumerate(xs)]
    added = jax.tree.map(lambda *a: np.sum(a, axis=0, dtype=a[0].dtype), *payloads)
    assert jax.tree.map(lambda a: a.dtype, added) == jax.tree.map(lambda a: a.dtype, payloads[0])
    np.testing.assert_array_equal(decode(compressor, added, one), np.sum(xs, axis=0))


def test_which_add_up() -> None:
    assert {name for name, case in CASES.items() if case.compressor.summable} == {"dense", "dense-bf16", "ternary-int8"}


@EVERY
def test_equal_configurations_are_one_static_argument(name: str) -> None:
    compressor = CASES[name].compressor
    twin = type(compressor)(**vars(compressor))
    assert twin is not compressor
    assert twin == compressor
    assert hash(twin) == hash(compressor)
    others = [case.compressor for other, case in CASES.items() if other != name]
    assert compressor not in others


def test_dense_is_the_cast() -> None:
    x = np.concatenate([gradient(compressors.dense(), rows=50), np.float32([[-0.0], [3e38], [1e-30], [1.00390625]])])
    np.testing.assert_array_equal(round_trip(compressors.dense(), x).view(np.uint32), x.view(np.uint32))
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(round_trip(compressors.dense(jnp.bfloat16), x), rounded)


def test_int8_is_within_half_a_step_and_stochastic_within_one() -> None:
    for stochastic, bound in ((False, 0.5), (True, 1.0)):
        compressor = compressors.block_quantized(block=13, stochastic=stochastic)
        x = gradient(compressor)
        step = np.abs(x).max(axis=1, keepdims=True) / 127
        error = np.abs(round_trip(compressor, x) - x) / step
        assert error.max() <= bound + 1e-4
        # Not merely small: quantization happens.
        assert error.max() > 0.4


REFUSED = [
    (lambda: compressors.dense(jnp.float16), ValueError, "dtype must be float32 or bfloat16, got float16"),
    (lambda: compressors.dense(jnp.int8), ValueError, "got int8"),
    (lambda: compressors.ternary(bucket_size=0), ValueError, "bucket_size must be an integer of at least 1, got 0"),
    (lambda: compressors.ternary(bucket_size=2.5), ValueError, "bucket_size must be an integer of at least 1, got 2.5"),
    (lambda: compressors.ternary(clip=0), ValueError, "clip must be a positive Python number or None, got 0"),
    (lambda: compressors.ternary(clip=-1.0), ValueError, "got -1.0"),
    (lambda: compressors.ternary(clip=jnp.float32(2)), ValueError, "clip must be a positive Python number"),
    (
        lambda: compressors.ternary(granularity="tensors"),
        ValueError,
        "granularity.*'bucket', got 'tensors'; did you mean",
    ),
    (lambda: compressors.ternary(packing="base4"), ValueError, "packing must be one of 'base3', 'int8', got 'base4'"),
    (lambda: compressors.ternary(downlink="exac"), ValueError, "downlink must be.*did you mean 'exact'"),
    (lambda: compressors.ternary(generator="hashes"), ValueError, "generator must be.*did you mean 'hash'"),
    (
        lambda: compressors.ternary(share_scale=False),
        ValueError,
        "downlink='exact' needs share_scale=True.*downlink='ternary'",
    ),
    (lambda: compressors.topk(0), ValueError, r"density must be in \(0, 1\], got 0"),
    (lambda: compressors.topk(1.5), ValueError, r"density must be in \(0, 1\], got 1.5"),
    (lambda: compressors.topk(float("nan")), ValueError, "density must be in"),
    (lambda: compressors.topk(0.1, block=0), ValueError, "block must be an integer of at least 1, got 0"),
    (lambda: compressors.topk(0.1, block=2**21), ValueError, "block must be at most 1048576, got 2097152"),
    (lambda: compressors.topk(0.1, downlink_density=2), ValueError, r"downlink_density must be in \(0, 1\], got 2"),
    (
        lambda: compressors.topk(0.1, dtype=jnp.float16),
        ValueError,
        "dtype must be float32, bfloat16 or int8, got float16",
    ),
    (lambda: compressors.topk(jnp.float32(0.1)), TypeError, "density must be a Python number.*static_args"),
    (lambda: compressors.block_quantized(bits=3), ValueError, "bits must be one of 8, 4, 2, got 3"),
    (
        lambda: compressors.block_quantized(format="e3m0", bits=8),
        ValueError,
        "format='e3m0' is of 4 bits: pass bits=4, got 8",
    ),
    (
        lambda: compressors.block_quantized(format="e2m1"),
        ValueError,
        "format must be one of 'int', .* 'nvfp4', got 'e2m1'",
    ),
    (
        lambda: compressors.block_quantized(format="mxfp8", bits=4),
        ValueError,
        "format='mxfp8' has bits=8, got bits=4: leave bits out, or take format='int'",
    ),
    (
        lambda: compressors.block_quantized(format="nvfp4", block=32),
        ValueError,
        "format='nvfp4' has block=16, got block=32: leave block out",
    ),
    (
        lambda: compressors.block_quantized(format="mxfp4", stochastic=True),
        ValueError,
        "format='mxfp4' has stochastic=False, got stochastic=True: leave stochastic out",
    ),
    (
        lambda: compressors.block_quantized(format="mxfp4", norm="l2"),
        ValueError,
        "format='mxfp4' has norm='max', got norm='l2': leave norm out",
    ),
    (lambda: compressors.block_quantized(block=-1), ValueError, "block must be an integer of at least 1, got -1"),
    (lambda: compressors.block_quantized(block=True), ValueError, "block must be an integer of at least 1, got True"),
    (
        lambda: compressors.block_quantized(generator="x"),
        ValueError,
        "generator must be one of 'hash', 'threefry', got 'x'",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused_at_construction(build, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()
