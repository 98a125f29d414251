"""Laws of all codes: what crosses, what padding, zeros and constants become, and that one bad entry is always seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp_jax as gc
from gradcomp_jax import compressors
from gradcomp_jax.compressors import RowInfo
from gradcomp_jax.compressors.union import Union
from tests.marks import slow_but
from tests.programs import compiled, kernels

from .test_laws import CASES, SEEDED, Case, both_ways, full, gradient, side_of

f32, quantized = jnp.float32, compressors.block_quantized
NEW = {
    # 13 bits are 2 bytes.
    "sign-means": Case(compressors.sign("means", block=13), 2 + 8),
    "sign-l1": Case(compressors.sign("l1", block=13), 2 + 4),
    "sign-unit": Case(compressors.sign("unit", block=13), 2 + 1),
    "random-k": Case(compressors.random_k(0.25, block=13), 3 * 2),
    "random-k-f32": Case(compressors.random_k(0.25, block=13, dtype=f32), 3 * 4),
    "random-k-one": Case(compressors.random_k(0.01, block=13), 2),
    "rotated-2": Case(compressors.rotated(2, block=64, unbiased=False), 16 + 4),
    "rotated-3": Case(compressors.rotated(3, block=64), 7 * 4 + 4),  # ten to a word
    "rotated-4": Case(compressors.rotated(4, block=64, unbiased=False), 32 + 4),
    "e4m3": Case(compressors.float8("e4m3", block=13), 13 + 4),
    "e4m3-plain": Case(compressors.float8("e4m3", block=13, scaled=False), 13),
    "fixed-8": Case(compressors.fixed_point(bits=8, fraction_bits=5, block=13), 13),
    "low-rank": Case(compressors.low_rank(2, (5, 7)), 7 * 2 * 4),
    "frequencies": Case(compressors.in_frequency(compressors.topk(0.25, block=13, dtype=f32)), 3 * (1 + 4)),
    "frequencies-int8": Case(compressors.in_frequency(quantized(block=13)), 13 + 4),
    "union": Case(Union(13, 3), 3 * (1 + 4)),
    "union-whole": Case(Union(13, 11), 13 * 4),
    "e3m0": Case(quantized(bits=4, block=13, format="e3m0"), 7 + 4),
    # Rows of 256, whose blocks have a byte for a scale.
    "mxfp8": Case(quantized(format="mxfp8"), 256 + 8),
    "mxfp4": Case(quantized(format="mxfp4"), 128 + 8),
    "nvfp4": Case(quantized(format="nvfp4"), 128 + 16 + 4),
    "l2-4": Case(quantized(bits=4, block=13, norm="l2", stochastic=True), 7 + 4),
}
# A matrix is one row; all others have several.
ROWS = 4
ALL = {**CASES, **NEW}
SLOW = (
    *("topk-wide", "ternary-bucket", "int2-stochastic", "rotated-3", "frequencies-int8", "union-whole", "e3m0"),
    *("mxfp8", "mxfp4"),
)
EACH, EACH_NEW = (pytest.mark.parametrize("name", slow_but(set(names) - set(SLOW), names)) for names in (ALL, NEW))


def rows_for(name: str, seed: int = 0) -> np.ndarray:
    """Normal entries; of a union, as many as it holds."""
    compressor = ALL[name].compressor
    x = gradient(compressor, seed, rows=1 if name == "low-rank" else ROWS)
    if isinstance(compressor, Union):
        x[:, compressor.k :] = 0
        x = np.random.default_rng(seed).permuted(x, axis=1)
    return x


@EACH
def test_payload_leads_with_rows_and_weighs_what_it_says(name: str) -> None:
    """Bits are packed, so bytes are what the documentation counts; positions are unsigned, never floating point."""
    compressor, row_bytes = ALL[name]
    x = rows_for(name)
    payload, _, decoded, sent = both_ways(compressor, x)
    leaves = jax.tree.leaves(payload)
    assert all(leaf.shape[0] == len(x) for leaf in leaves)
    assert sum(leaf.nbytes for leaf in leaves) == len(x) * row_bytes == compressor.payload_bytes(len(x))
    fields = payload._asdict() if hasattr(payload, "_asdict") else vars(payload)
    if fields.get("index") is not None:
        assert fields["index"].dtype == (jnp.uint8 if compressor.block <= 256 else jnp.uint16)
    if "words" in fields and name in NEW:
        whole = {"fixed-8": jnp.int8, "frequencies-int8": jnp.int8}
        packed = jnp.uint32 if name == "rotated-3" else jnp.uint8
        assert fields["words"].dtype == whole.get(name, packed)
    assert (decoded.shape, decoded.dtype) == (x.shape, f32)
    if not name.endswith("-int8"):  # which may round what it sends to zero
        np.testing.assert_array_equal(sent, np.asarray(decoded) != 0)


@pytest.mark.parametrize(
    "name",
    (
        *("ternary-own", "topk-3-int8", "int4", "int8-stochastic", "rotated-4", "frequencies", "union"),
        *("fixed-8", "e4m3", "e3m0", "random-k", "sign-means"),
    ),
)
def test_no_rows_are_no_bytes(name: str) -> None:
    compressor = ALL[name].compressor
    payload, _, decoded, _ = both_ways(compressor, rows_for(name)[:0])
    assert {leaf.shape[0] for leaf in jax.tree.leaves(payload)} == {0} == {compressor.payload_bytes(0)}
    assert (decoded.shape, decoded.dtype) == ((0, compressor.block), f32)


@EACH
def test_zeros_stay_zeros(name: str) -> None:
    """In a gradient of nothing else, and in a row among others."""
    x = rows_for(name)
    _, finite, decoded, sent = both_ways(ALL[name].compressor, np.zeros_like(x))
    np.testing.assert_array_equal(decoded, np.zeros_like(x))
    assert not np.asarray(sent).any()
    assert finite
    if len(x) > 1:
        x[1] = 0
        decoded = np.asarray(both_ways(ALL[name].compressor, x)[2])
        np.testing.assert_array_equal(decoded[1], x[1])
        assert decoded[[0, 2, 3]].any(axis=1).all()


# A union's rows are mostly zeros by its contract. An l2 norm makes a constant's integers small: to one step of them.
# Levels are multiples of a scale: see test_ternary.py.
CONSTANT = {n: c.compressor for n, c in ALL.items() if n not in SLOW and not n.startswith(("union", "levels"))}
FIXED_RANGE = ("fixed", "e4m3-plain")


@pytest.mark.parametrize("value", (0.1, -3.3, 1e30, 1e-30, -1e-30))
@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_comes_back(name: str, value: float) -> None:
    """Neither lost nor magnified: the chosen entries, or all, to the code's own precision."""
    code = CONSTANT[name]
    if name.startswith(FIXED_RANGE) and abs(value) not in (0.1, 3.3):
        pytest.skip("beyond the one range there is")
    x = np.full_like(rows_for(name), value)
    decoded = np.asarray(both_ways(code, x)[2], np.float64) / value
    if name in CASES:
        sent = decoded != 0
        assert sent.sum(axis=1).min() >= (code.k if code.is_sparsifier else code.block)
        exact = name in ("dense", "topk-3-f32", "topk-all")
        np.testing.assert_allclose(decoded[sent], np.float64(np.float32(value)) / value, rtol=0 if exact else 2.0**-8)
    elif name == "sign-unit":
        np.testing.assert_allclose(decoded * abs(value), 1, rtol=1e-6)
    elif name.startswith("random-k"):
        sent = decoded != 0
        assert (sent.sum(axis=1) == code.k).all()
        np.testing.assert_allclose(decoded[sent], 1.0, rtol=2.0**-8)
    elif name.startswith("rotated"):
        # What so many bits leave of anything (1: pi / 2 - 1), with room for few rows.
        assert ((decoded - 1) ** 2).mean() < 1.5 * {1: 0.571, 2: 0.133, 3: 0.036, 4: 0.0096}[code.bits]
    elif name.startswith("l2"):
        assert np.abs(decoded - 1).max() < np.sqrt(13) / (2 ** (code.bits - 1) - 1) + 1e-5
        assert (decoded >= 0).all()
        assert decoded.any()
    else:
        step = {"fixed-8": 2.0**-5}.get(name, 2.0**-4 * abs(value)) / abs(value)
        np.testing.assert_allclose(decoded, 1, atol=step)


CONTRACTIONS = (
    *("sign-means", "sign-l1", "random-k", "random-k-f32", "rotated-2", "rotated-4", "e3m0", "e4m3", "low-rank"),
    *("frequencies", "frequencies-int8", "union", "union-whole", "int8", "int4", "topk-1", "topk-3-int8"),
    "nvfp4",
)


@pytest.mark.parametrize("kind", ("normal", "heavy", "one"))
@pytest.mark.parametrize("name", CONTRACTIONS)
def test_less_is_left_than_there_was(name: str, kind: str) -> None:
    """What residuals need to stay bounded: no row's error is longer than the row, and most are shorter."""
    compressor, x = ALL[name].compressor, rows_for(name)
    if kind == "heavy":
        x *= np.exp(2 * np.random.default_rng(1).standard_normal(x.shape)).astype(np.float32)
    if kind == "one":
        x = np.where(np.arange(compressor.block) == 5, x + 3, 0).astype(np.float32)
    decoded = np.asarray(both_ways(compressor, x)[2], np.float64)
    left, whole = (np.linalg.norm(v, axis=1) for v in (decoded - x, x.astype(np.float64)))
    assert (left <= whole * (1 + 1e-6)).all()
    if not name.startswith("random-k"):  # it may miss what there is
        assert left.sum() < 0.97 * whole.sum()


@EACH_NEW
def test_padding_decodes_to_zero_or_the_code_says_that_it_does_not(name: str) -> None:
    compressor = NEW[name].compressor
    if name == "low-rank":
        pytest.skip("a matrix has no padding")
    count = np.int32([13, 8, 1, 0] if compressor.block == 13 else [compressor.block, 40, 1, 0])
    padding = np.arange(compressor.block) >= count[:, None]
    x = np.where(padding, 0, rows_for(name)).astype(np.float32)
    decoded = np.asarray(both_ways(compressor, x, 0, count)[2])
    assert (decoded[padding] != 0).any() <= compressor.pads_nonzero
    assert not decoded[3].any()


COORDINATES = {
    "sign-means": lambda block: compressors.sign("means", block=block),
    "sign-l1": lambda block: compressors.sign("l1", block=block),
    "e4m3": lambda block: compressors.float8("e4m3", block=block),
    "int8": lambda block: quantized(block=block),
    "int4": lambda block: quantized(bits=4, block=block),
    "e3m0": lambda block: quantized(bits=4, block=block, format="e3m0"),
    "int8-l2": lambda block: quantized(block=block, norm="l2"),
}


@pytest.mark.parametrize("name", COORDINATES)
def test_no_statistic_sees_the_padding(name: str) -> None:
    """A row with padding decodes as a row of its length does."""
    make, x = COORDINATES[name], np.random.default_rng(3).normal(1.0, 1.0, (3, 16)).astype(np.float32)
    padded = np.pad(x, [(0, 0), (0, 24)])
    short, long = (
        np.asarray(both_ways(make(r.shape[1]), r, 0, np.full(3, 16, np.int32))[2])[:, :16] for r in (x, padded)
    )
    np.testing.assert_allclose(long, short, rtol=1e-6)


@pytest.mark.parametrize("scaling", ("l1", "means"))
def test_frequencies_fill_the_padding(scaling: str) -> None:
    """They are as many as the block has entries, of which five are the row's."""
    code, x = compressors.in_frequency(compressors.sign(scaling, block=64)), np.zeros((4, 64), np.float32)
    x[:, :5] = np.random.default_rng(0).standard_normal((4, 5))
    decoded = np.asarray(both_ways(code, x, 0, np.full(4, 5, np.int32))[2])
    assert (np.linalg.norm(decoded - x, axis=1) < np.linalg.norm(x, axis=1)).all()


def test_the_mean_of_positive_entries_stands_beside_large_negative_ones() -> None:
    x = np.full((1, 2048), 1e-3, np.float32)
    x[0, :2] = -1e6, -3.3e5
    _, _, decoded, _ = both_ways(compressors.sign("means", block=2048), x)
    np.testing.assert_allclose(decoded[0, 2:], 1e-3, rtol=1e-5)
    np.testing.assert_allclose(decoded[0, :2], -6.65e5, rtol=1e-6)


@EACH
def test_reduce_is_the_sum_of_what_is_decoded(name: str) -> None:
    """Of each worker with its own seeds where there are such."""
    compressor = ALL[name].compressor
    xs = [rows_for(name, seed) for seed in range(3)]
    state = compressor.init((xs[0].size,))
    side = None
    if name in CASES:
        side = side_of(compressor, *xs)
        if side is not None:
            # A power of two: sums of its multiples are exact, in any order.
            side = np.exp2(np.ceil(np.log2(side))).astype(np.float32)
    elif compressor.side_information in SEEDED:
        side = kernels.row_seeds(jax.random.key(5), ROWS)
    elif compressor.side_information:
        side = compiled(compressor.from_mean)(compiled(compressor.statistic)(xs[0], RowInfo(full(xs[0])), state))

    @jax.jit
    def encode(worker, x):
        info = RowInfo(full(x), jax.random.key(worker), side=compressor.side_of(side, worker))
        payload, _ = compressor.encode(x, state, info)
        return payload, compressor.decode(payload, info)

    payloads, decoded = zip(*(encode(np.int32(w), x) for w, x in enumerate(xs)), strict=True)
    stacked = jax.tree.map(lambda *a: np.stack(a), *payloads)
    got = jax.jit(lambda p: compressor.reduce(p, RowInfo(side=side)))(stacked)
    if name.startswith(("ternary", "levels", "topk", "int4", "int2")):
        np.testing.assert_array_equal(got, functools.reduce(np.add, map(np.asarray, decoded)))
        return
    want = np.sum(np.asarray(decoded, np.float64), axis=0)
    if name in CASES:
        # The order of a dense sum, and whether a product is rounded before it is added, are the compiler's.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        return
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


@EACH_NEW
def test_what_is_sent_and_what_is_kept_make_the_target(name: str) -> None:
    """In one worker's exchange over a tensor with a last row that is not full: every step's books balance."""
    compressor = NEW[name].compressor
    shape = compressor.shape if name == "low-rank" else (3, compressor.block - 2)
    tx = gc.exchange(compressor, axis_name=None, mask=True)
    state, update = jax.jit(tx.init)({"w": np.zeros(shape, np.float32)}), jax.jit(tx.update)
    rng, total, arrived = np.random.default_rng(0), np.zeros(shape), np.zeros(shape)
    for _ in range(4):
        g = rng.normal(size=shape).astype(np.float32)
        if isinstance(compressor, Union):
            g *= rng.permuted(np.arange(g.size) < compressor.k).reshape(shape)
        updates, state = update({"w": g}, state)
        total, arrived = total + g, arrived + np.asarray(updates["w"], np.float64)
        kept = np.asarray(state.memory[0][0].value).reshape(-1)
        assert not kept[g.size :].any()
        np.testing.assert_allclose(arrived + kept[: g.size].reshape(shape), total, atol=1e-5)
    assert not state.skipped
    assert arrived.any()


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf), ids=str)
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("levels", *SLOW)])
def test_a_bad_entry_is_seen_wherever_it_is(name: str, bad: float) -> None:
    """In every place of a row, chosen or not; and a large number is none."""
    compressor, x = ALL[name].compressor, rows_for(name)
    large = 1e30
    for scale in (1.0, large, 1 / large):
        assert both_ways(compressor, x * np.float32(scale))[1]
    row = len(x) // 2
    places = range(compressor.block) if compressor.block < 100 else (0, 1, 100, 255, compressor.block - 1)
    for place in places:
        broken = x.copy()
        broken[row, place] = bad
        if isinstance(compressor, Union):
            # Room for it: the others that are not zero are fewer than k.
            broken[row, np.flatnonzero((x[row] != 0) & (np.arange(compressor.block) != place))[:1]] = 0
        assert not both_ways(compressor, broken)[1], f"entry {place}"
