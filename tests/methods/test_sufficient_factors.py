"""Sufficient factors: the exact mean of a dense layer's gradient, from whichever exchange sends fewer bytes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax import _compat
from gradcomp_jax.collectives import factors
from gradcomp_jax.methods.sufficient_factors import factored_dot
from tests.marks import slow_but

AXIS = "data"
N = 8
EXCHANGES = ("factors", "dense")
ENVIRONMENTS = ("shard_map-auto-vma", "shard_map-auto", "shard_map-explicit-vma", "shard_map-explicit", "pmap", "vmap")
REPLICATED = PartitionSpec()


def mesh_of(kind=AxisType.Auto, shape=(N,), names=(AXIS,)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def by_worker(name, f):
    """``f(x, t, w)`` of each worker's ``x`` and ``t`` and the common ``w``; results stacked by worker."""
    if not name.startswith("shard_map"):
        if name == "pmap":
            return jax.pmap(f, in_axes=(0, 0, None), axis_name=AXIS)
        return jax.jit(jax.vmap(f, in_axes=(0, 0, None), axis_name=AXIS))
    mesh = mesh_of(AxisType.Explicit if "explicit" in name else AxisType.Auto)
    spec = PartitionSpec(AXIS)

    def one(x, t, w):
        return jax.tree.map(lambda a: a[None], f(x[0], t[0], w))

    mapped = jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=(spec, spec, REPLICATED), out_specs=spec, check_vma=name.endswith("vma"))
    )
    place = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
    return lambda x, t, w: mapped(place(x), place(t), jax.device_put(w, jax.NamedSharding(mesh, REPLICATED)))


def draw(*batch, rows=12, columns=5, dtype=np.float32):
    """Activations and cotangents of all workers, and the weight."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, *batch, rows)).astype(dtype)
    t = rng.normal(size=(N, *batch, columns)).astype(dtype)
    return x, t, rng.normal(size=(rows, columns)).astype(dtype)


def gradients(exchange, axis_name=AXIS):
    """The local gradients of x and w for the cotangent t, w cast to varying as local_value_and_grad does."""

    def loss(w, x, t):
        return jnp.sum(factored_dot(x, w, axis_name=axis_name, exchange=exchange) * t)

    def f(x, t, w):
        return jax.grad(loss, argnums=(0, 1))(_compat.varying(w, axis_name), x, t)

    return f


def oracle(x, t):
    """The mean over the workers of each one's dense gradient, in float64."""
    flat = x.astype(np.float64).reshape(N, -1, x.shape[-1]), t.astype(np.float64).reshape(N, -1, t.shape[-1])
    return np.einsum("nbi,nbo->io", *flat) / N


def close(got, expected, tolerance):
    assert np.abs(np.asarray(got, np.float64) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "exchange"),
    slow_but(
        [("vmap", "factors"), ("vmap", "dense"), ("shard_map-explicit-vma", "factors"), ("shard_map-auto", "dense")],
        [*((name, "factors") for name in ENVIRONMENTS), ("vmap", "dense"), ("shard_map-auto", "dense")],
    ),
)
def test_gradient_is_the_mean_on_every_worker(name, exchange):
    x, t, w = draw(3, 4)
    for_w, for_x = jax.tree.map(np.asarray, by_worker(name, gradients(exchange))(x, t, w))
    assert for_w.dtype == w.dtype
    for mine in for_w:
        close(mine, oracle(x, t), 1e-6)
        np.testing.assert_array_equal(mine, for_w[0])
    close(for_x, t.astype(np.float64) @ w.T.astype(np.float64), 1e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_replicated_input_gets_the_sum_as_from_jax(exchange):
    """A constant that feeds the layer is differentiated as jax.grad does it: over the workers it is a sum."""
    mesh, (x, t, w) = mesh_of(), draw(4)

    def loss(x, w, t, dot):
        return jnp.sum(dot(x, _compat.varying(w, AXIS)) * t)

    def mapped(dot):
        specs = (REPLICATED, REPLICATED, PartitionSpec(AXIS))
        f = jax.grad(functools.partial(loss, dot=dot))
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=REPLICATED))(x[0], w, t.reshape(-1, 5))

    ours = mapped(functools.partial(factored_dot, axis_name=AXIS, exchange=exchange))
    np.testing.assert_allclose(ours, mapped(jnp.matmul), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_other_axes_add_up_as_from_jax(exchange):
    """Tokens split over a second axis: the mean is over ``data``, the sum that jax.grad makes over ``tokens``."""
    mesh = mesh_of(shape=(2, 4), names=(AXIS, "tokens"))
    x, t, w = draw(4)
    spec = PartitionSpec((AXIS, "tokens"))

    def f(x, t, w):
        return _compat.invarying(gradients(exchange)(x, t, w)[0], AXIS)

    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, REPLICATED), out_specs=REPLICATED))(
        x.reshape(-1, 12), t.reshape(-1, 5), w
    )
    close(got, oracle(x, t) * N / 2, 1e-6)


def report_of(exchange, x, t, w):
    mesh, spec = mesh_of(), PartitionSpec(AXIS)

    def f(x, t, w):
        return _compat.invarying(gradients(exchange)(x, t, w)[0], AXIS)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, REPLICATED), out_specs=REPLICATED)
    flat = x.reshape(-1, x.shape[-1]), t.reshape(-1, t.shape[-1])
    return gc.wire_bytes(jax.jit(mapped).lower(*flat, w).compile(), mesh=mesh)


def test_factors_send_their_own_bytes_and_nothing_dense():
    batch, rows, columns = 4, 64, 48
    report = report_of("factors", *draw(batch, rows=rows, columns=columns))
    assert report.sent == (N - 1) * batch * (rows + columns) * 4
    assert [row.kind for row in report.rows] == ["all-gather"]
    assert report.rows[0].dtype == "u32"


def test_dense_sends_one_all_reduce():
    rows, columns = 16, 12
    report = report_of("dense", *draw(64, rows=rows, columns=columns))
    assert report.sent == math.ceil(2 * (N - 1) * rows * columns * 4 / N)
    assert [row.kind for row in report.rows] == ["all-reduce"]


@pytest.mark.standard_promotion
def test_bfloat16_activations_beside_a_float32_weight():
    """The product and its cotangent are float32; the activations still cross as they are, in the same buffer."""
    batch, rows, columns = 4, 64, 48
    x, t, w = draw(batch, rows=rows, columns=columns)
    x = x.astype(jnp.bfloat16)
    report = report_of("factors", x, t, w)
    assert {row.dtype: row.sent_bytes for row in report.rows} == {"u16": (N - 1) * batch * (rows * 2 + columns * 4)}
    for_w, for_x = by_worker("shard_map-auto-vma", gradients("factors"))(x, t, w)
    assert for_w.dtype == jnp.float32 and for_x.dtype == jnp.bfloat16
    close(for_w[0], oracle(np.asarray(x, np.float32), t), 1e-6)


@pytest.mark.parametrize(("name", "exchange"), [("shard_map-auto-vma", "dense"), ("vmap", "factors")])
def test_bfloat16_is_accumulated_in_float32(name, exchange):
    """2,048 terms: the only rounding to bfloat16 is the last, half a unit in its eighth bit."""
    x, t, w = (a.astype(jnp.bfloat16) for a in draw(256))
    for_w, _ = by_worker(name, gradients(exchange))(x, t, w)
    assert for_w.dtype == jnp.bfloat16
    exact = oracle(np.asarray(x, np.float32), np.asarray(t, np.float32))
    got = np.asarray(for_w[0], np.float64)
    assert (np.abs(got - exact) <= 2.0**-8 * np.abs(exact) * 1.001 + 1e-5).all()


@pytest.mark.parametrize("batch", [3, 4])
def test_auto_is_the_cheaper_on_both_sides_of_break_even(batch):
    """Break-even at N batch (in + out) = 2 in out: 2 * 32 * 24 / (8 * 56) = 3.43 rows a worker."""
    drawn = draw(batch, rows=32, columns=24)
    report = report_of("auto", *drawn)
    assert [row.kind for row in report.rows] == ["all-gather" if batch <= 3 else "all-reduce"]
    assert report.sent == min(report_of(exchange, *drawn).sent for exchange in EXCHANGES)


def test_auto_prefers_dense_of_equals():
    x, delta = jax.ShapeDtypeStruct((4, 16), jnp.float32), jax.ShapeDtypeStruct((4, 16), jnp.float32)
    assert factors.factor_bytes(x, delta, workers=4) == factors.product_bytes(x, delta, workers=4)
    assert factors.resolve("auto", x, delta, workers=4) == "dense"
    assert factors.resolve("auto", x, delta, workers=3) == "factors"
    assert factors.resolve("auto", x, delta, workers=1) == "dense"


@pytest.mark.parametrize("exchange", ["auto", *EXCHANGES])
def test_no_axis_is_the_plain_product(exchange):
    x, t, w = (a[0] if i < 2 else a for i, a in enumerate(draw(3, 4)))
    got = jax.jit(gradients(exchange, None))(x, t, w)
    plain = jax.jit(jax.grad(lambda w, x: jnp.sum((x @ w) * t), argnums=(0, 1)))(w, x)
    for a, b in zip(got, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_evaluation_needs_no_axis_but_a_gradient_does():
    x, t, w = (a[0] if i < 2 else a for i, a in enumerate(draw(4)))
    np.testing.assert_array_equal(factored_dot(x, w, axis_name=AXIS), jnp.matmul(x, w))
    with pytest.raises(NameError, match=r"'data' is not bound.*axis_name=None"):
        gradients("auto")(x, t, w)


@pytest.mark.parametrize(("batch", "exchange"), [((), "factors"), ((0,), "dense"), ((0,), "factors")])
def test_no_batch_or_an_empty_one(batch, exchange):
    x, t, w = draw(*batch)
    for_w, for_x = by_worker("shard_map-auto-vma", gradients(exchange))(x, t, w)
    np.testing.assert_allclose(for_w[0], oracle(x, t), atol=1e-5)
    assert for_x.shape == x.shape


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_non_finite_values_reach_everybody(exchange):
    """The exchange decides what to do with them; nothing may hide them."""
    x, t, w = draw(4)
    x[3, 0, 0] = np.nan
    for_w, _ = by_worker("shard_map-auto-vma", gradients(exchange))(x, t, w)
    assert np.isnan(for_w[:, 0]).all()
    assert np.isfinite(for_w[:, 1:]).all()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_second_derivatives_are_refused(exchange):
    """Gathered words carry no derivative: zero would be silently wrong."""
    x, t, w = draw(4)

    def f(x, t, w):
        def norm(x):
            return jnp.sum(gradients(exchange)(x, t, w)[0] ** 2)

        return jax.grad(norm)(x)

    with pytest.raises(NotImplementedError, match="axis_name=None"):
        by_worker("vmap", f)(x, t, w)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((4, 3), (5, 2), r"in = 5.*\(4, 3\).*\(5, 2\).*transposed"),
        ((4, 3), (3,), r"w must be \[in, out\].*\(3,\)"),
        ((4, 3), (1, 3, 2), r"w must be \[in, out\]"),
        ((), (3, 2), r"x must be \[\.\.\., in\]"),
    ],
)
def test_wrong_shapes(x, w, message):
    with pytest.raises(ValueError, match=message):
        factored_dot(np.zeros(x, np.float32), np.zeros(w, np.float32), axis_name=AXIS)


def test_wrong_dtypes_and_names():
    x, w = np.zeros((4, 3), np.float32), np.zeros((3, 2), np.float32)
    with pytest.raises(TypeError, match=r"x must be floating.*int32"):
        factored_dot(x.astype(jnp.int32), w, axis_name=AXIS)
    with pytest.raises(TypeError, match=r"w must be floating.*complex64"):
        factored_dot(x, w.astype(jnp.complex64), axis_name=AXIS)
    with pytest.raises(ValueError, match="did you mean 'factors'"):
        factored_dot(x, w, axis_name=AXIS, exchange="factor")
