"""The cast back from varying to replicated: a type that changes, and no instruction in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import gradcomp_jax as gc
from gradcomp_jax import _compat

AXIS = "data"
N = 8
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])


def mesh_of(kind=AxisType.Auto, shape=(N,), names=(AXIS,)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def mapped(f, mesh, out_specs=None, check_vma=True):
    """``f`` of a worker's shard; what it returns claims to be replicated unless told otherwise."""
    spec = PartitionSpec(mesh.axis_names)
    out_specs = PartitionSpec() if out_specs is None else out_specs
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=check_vma))


def placed(mesh, x):
    return jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(mesh.axis_names)))


def ring_sum(x, axis=AXIS):
    """An all-reduce by neighbours: equal on all workers because integers add exactly, varying for the tracking."""
    total, moving = x, x
    for _ in range(N - 1):
        moving = lax.ppermute(moving, axis, [(i, (i + 1) % N) for i in range(N)])
        total = total + moving
    return total


def data():
    return np.arange(N * 3, dtype=np.float32).reshape(N, 3)


def same_everywhere(x, like):
    """The constant 5 on every worker, which the tracking believes to vary."""
    return jnp.full(like.shape, 5.0) + 0 * x


@KINDS
def test_replicated_output_is_accepted_and_right(kind):
    mesh = mesh_of(kind)
    x = placed(mesh, data())
    with pytest.raises(ValueError, match=r"out_specs|replicat|varying"):
        mapped(ring_sum, mesh)(x)
    got = mapped(lambda x: _compat.invarying(ring_sum(x), AXIS), mesh)(x)
    assert got.sharding.is_fully_replicated
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data[0], data().sum(0))


@KINDS
def test_nothing_is_sent(kind):
    mesh = mesh_of(kind)
    program = mapped(lambda x: _compat.invarying(same_everywhere(x, x), AXIS), mesh)
    compiled = program.lower(placed(mesh, data())).compile()
    assert gc.wire_bytes(compiled).sent == 0
    text = compiled.as_text()
    assert not any(word in text for word in ("all-reduce", "all-gather", "collective-permute", "all-to-all"))


def test_type_loses_the_named_axis_only():
    mesh = mesh_of(shape=(2, 4), names=("slow", "fast"))

    def f(x):
        assert _compat.is_varying(x, ("slow", "fast"))
        one = _compat.invarying(x, "fast")
        assert not _compat.is_varying(one, "fast")
        assert _compat.is_varying(one, "slow")
        none = _compat.invarying(one, ("slow", "fast"))
        assert not _compat.is_varying(none, "slow")
        assert none.dtype == x.dtype and none.shape == x.shape
        again = _compat.varying(none, ("slow", "fast"))
        assert _compat.is_varying(again, ("slow", "fast"))
        return again

    mapped(f, mesh, PartitionSpec(("slow", "fast")))(placed(mesh, data()))


@pytest.mark.parametrize(("kind", "which"), [(AxisType.Auto, 1), (AxisType.Explicit, 2)])
def test_inside_switch_and_cond(kind, which):
    """Branches of different collectives agree on a replicated type, so they can stand in one program."""
    mesh = mesh_of(kind)

    def f(x):
        which_now = jnp.int32(which) + lax.psum(jnp.zeros((), jnp.int32), AXIS)
        branches = [
            lambda x: lax.psum(x, AXIS),
            lambda x: _compat.invarying(ring_sum(x), AXIS),
            lambda x: _compat.all_gather(x, AXIS).sum(0),
        ]
        a = lax.switch(which_now, branches, x)
        return a, lax.cond(which_now > 0, branches[1], branches[0], x)

    for got in mapped(f, mesh)(placed(mesh, data())):
        np.testing.assert_array_equal(got[0], data().sum(0))


def test_gradient_flows_through():
    """The sum of all workers' entries, squared: its gradient is 2 * sum on every worker."""
    mesh = mesh_of()

    def loss(x):
        return jnp.sum(_compat.invarying(ring_sum(x), AXIS) ** 2)

    got = jax.jit(jax.grad(lambda x: mapped(loss, mesh)(x)))(placed(mesh, data()))
    np.testing.assert_allclose(got, np.broadcast_to(2 * data().sum(0), data().shape), rtol=1e-6)


@CHECKS
@KINDS
def test_no_operation_where_nothing_varies(kind, check_vma):
    mesh = mesh_of(kind)

    def f(x):
        summed = lax.psum(x, AXIS)
        if check_vma:
            assert _compat.invarying(summed, AXIS) is summed
        return _compat.invarying(summed, AXIS)

    got = mapped(f, mesh, check_vma=check_vma)(placed(mesh, data()))
    np.testing.assert_allclose(got[:1], data().sum(axis=0, keepdims=True), rtol=1e-6)


def test_under_pmap_nothing_changes():
    got = jax.pmap(lambda x: _compat.invarying(x, AXIS), axis_name=AXIS)(data())
    np.testing.assert_array_equal(got, data())


def test_under_vmap_the_value_is_no_longer_mapped():
    """So that a replicated state stays one value, with ``out_axes=None``."""
    f = jax.vmap(lambda x: _compat.invarying(ring_sum(x), AXIS), axis_name=AXIS, out_axes=None)
    np.testing.assert_allclose(jax.jit(f)(data()), data().sum(axis=0), rtol=1e-6)
    with pytest.raises(ValueError, match="out_axes is None"):
        jax.vmap(ring_sum, axis_name=AXIS, out_axes=None)(data())


def test_no_operation_without_an_axis():
    tree = {"a": data(), "b": 1}
    assert _compat.invarying(tree, None) is tree
    assert _compat.invarying(tree, "not bound") is tree
