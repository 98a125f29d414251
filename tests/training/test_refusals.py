"""What is forgotten around an exchange is refused in a sentence that names the remedy, and every state can be donated."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from tests.training.problem import batch, loss, mesh_of, on, params

N = 8


def exchange(**options: Any) -> optax.GradientTransformation:
    return gc.dgc(axis_name="data", density=0.25, block=16, **options)


def chain() -> optax.GradientTransformation:
    return optax.chain(exchange(), optax.sgd(0.1))


def take_a_step(tx: optax.GradientTransformation, mesh: jax.sharding.Mesh | None = None, **options: Any) -> Any:
    mesh = mesh or mesh_of(N)
    placed = {name: value for name, value in options.items() if name != "check_vma"}
    state = gc.init_state(params(), tx, mesh, **placed)
    return gc.make_train_step(loss, tx, mesh, **options)(state, on(mesh, batch(0)))


def test_a_donated_state(tmp_path) -> None:
    mesh, tx = mesh_of(N), chain()
    step = gc.make_train_step(loss, tx, mesh)
    state = gc.init_state(params(), tx, mesh)
    new, _ = step(state, on(mesh, batch(0)))
    with pytest.raises(ValueError, match=r"donated to an earlier step.*donate=False"):
        step(state, on(mesh, batch(0)))
    others = (
        lambda: gc.save_checkpoint(tmp_path / "saved", state),
        lambda: gc.checkpoint_metadata(state),
        lambda: gc.resize_workers(state, old=N, new=2),
        lambda: gc.diagnostics(state),
    )
    for use in others:
        with pytest.raises(
            ValueError, match=r"donated to an earlier step.*go on with the state that the step returned"
        ):
            use()
    assert not any(tmp_path.iterdir())
    step(new, on(mesh, batch(0)))


@pytest.mark.parametrize("on_host", (False, True))
def test_a_state_of_another_number_of_workers(on_host: bool) -> None:
    mesh, tx = mesh_of(N), chain()
    state = gc.init_state(params(), tx, mesh_of(2))
    state = jax.tree.map(np.asarray, state) if on_host else state
    sentence = r"state is of 2 workers, and the mesh has 8 along 'data': .*resize_workers\(state, old=2, new=8\)"
    with pytest.raises(ValueError, match=sentence):
        gc.make_train_step(loss, tx, mesh)(state, on(mesh, batch(0)))


def test_a_state_on_other_devices() -> None:
    mesh, tx = mesh_of(N), optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
    state = gc.init_state(params(), tx, mesh_of(2))
    with pytest.raises(
        ValueError, match=r"lies on other devices than the 8 of the step's mesh: make the state on that"
    ):
        gc.make_train_step(loss, tx, mesh)(state, on(mesh, batch(0)))


def test_a_state_of_plain_init() -> None:
    mesh, tx = mesh_of(N), chain()
    state = gc.TrainState(jnp.zeros((), jnp.int32), params(), tx.init(params()))
    with pytest.raises(ValueError, match=r"tx.init\(params\) was called outside the axis.*gradcomp_jax.init_state"):
        gc.make_train_step(loss, tx, mesh)(state, on(mesh, batch(0)))


def test_a_batch_that_is_not_placed_on_an_explicit_mesh() -> None:
    mesh, tx = mesh_of(N, explicit=True), chain()
    state, step = gc.init_state(params(), tx, mesh), gc.make_train_step(loss, tx, mesh)
    with pytest.raises(ValueError, match=r"is not split over 'data'.*gradcomp_jax.data_sharding"):
        step(state, batch(0))


@pytest.mark.standard_promotion
def test_an_optimizer_without_the_extra_arguments_of_a_step() -> None:
    from optax import contrib

    sam = contrib.sam(optax.sgd(0.1), contrib.normalize(), sync_period=2)
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument '\w+': .*optax\.GradientTransformation\(tx\.init"
    ):
        take_a_step(optax.chain(exchange(), sam))
    _, metrics = take_a_step(optax.chain(exchange(), optax.GradientTransformation(sam.init, sam.update)))
    assert jnp.isfinite(metrics["loss"])


def test_no_exchange() -> None:
    with pytest.raises(
        ValueError, match=r"no exchange averages its gradient:\s+\(a\) put an exchange such as gradcomp_jax.dgc"
    ):
        take_a_step(optax.sgd(0.1))


@pytest.mark.parametrize("first", [optax.trace(0.9), optax.zero_nans()], ids=["trace", "nans"])
def test_what_keeps_state_before_the_exchange(first: optax.GradientTransformation) -> None:
    sentence = r"'0/\w+/\w+' of the optimizer's state differs by worker over 'data'.*Put it after the exchange"
    with pytest.raises(ValueError, match=sentence):
        take_a_step(optax.chain(first, chain()))


def test_an_exchange_over_another_axis() -> None:
    sentence = r"workers lie along 'data'.*give both the same axis_name.*'batch' is not bound"
    for tx in (gc.terngrad(axis_name="batch"), gc.dense(axis_name="batch")):
        with pytest.raises(NameError, match=sentence):
            take_a_step(tx)


def test_an_exchange_over_fewer_axes_than_the_step() -> None:
    """Otherwise shard_map says so, and advises not to check: replicas would part."""
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    both = ("replica", "data")
    tx = optax.chain(gc.dense(axis_name="data"), optax.sgd(0.1))
    state = gc.init_state(params(), tx, mesh, axis_name=both)
    step = gc.make_train_step(loss, tx, mesh, axis_name=both)
    with pytest.raises(
        ValueError, match=r"differs by worker over 'replica', because no exchange averages its gradient"
    ):
        step(state, batch(0))


def averaged_loss(p: Any, batch: Any) -> Any:
    return jax.lax.pmean(loss(p, batch), "data")


def test_a_loss_that_is_averaged_inside() -> None:
    def found(p: Any, batch: Any) -> Any:
        return averaged_loss(p, batch), loss(p, batch)

    mesh, given = mesh_of(N), {"has_aux": True, "accumulate": 3}
    step = gc.make_train_step(found, chain(), mesh, **given)
    sentence = r"the loss is the same on all workers.*over 'data' inside.*without jax.lax.pmean"
    with pytest.raises(ValueError, match=sentence):
        step(gc.init_state(params(), chain(), mesh), batch(0))
    with pytest.raises(ValueError, match=sentence):
        jax.jit(gc.local_value_and_grad(found, axis_name="data", mesh=mesh, **given))(params(), batch(0))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"x": np.ones((20, 12), np.float32)},
            r"8 devices along 'data' do not divide the batch 'x' of 20: choose a multiple",
        ),
        ({"scale": 2.0}, r"the batch 'scale' is one number.*close over it"),
    ],
)
def test_a_batch_that_is_not_divided(given: dict[str, Any], sentence: str) -> None:
    mesh = mesh_of(N)
    with pytest.raises(ValueError, match=sentence):
        gc.make_train_step(loss, chain(), mesh)(gc.init_state(params(), chain(), mesh), {**batch(0), **given})


@pytest.mark.parametrize(
    ("other", "how"), [(np.ones(8, np.float32), "outside"), (np.zeros(2, np.uint32), "accumulate")]
)
def test_positional_arrays_that_are_no_batch(other: Any, how: str) -> None:
    def found(p: Any, batch: Any, other: Any) -> Any:
        return loss(p, batch)

    given = {"axis_name": "data", "mesh": mesh_of(N)} if how == "outside" else {"axis_name": None, "accumulate": 2}
    sentence = r"positional arrays are the batch.*which is 24 in one argument and \d+.* in another: pass .* by keyword"
    with pytest.raises(ValueError, match=sentence):
        gc.local_value_and_grad(found, **given)(params(), batch(0), other)


def test_a_batch_by_keyword() -> None:
    with pytest.raises(ValueError, match=r"no positional argument is a batch.*pass the batch by position"):
        gc.local_value_and_grad(loss, axis_name="data", mesh=mesh_of(N))(params(), batch=batch(0))


@pytest.mark.parametrize("name", ("accumulate", "weight_decay"))
def test_before_an_exchange_of_sharded_parameters(name: str) -> None:
    specs = jax.tree.map(lambda p: P("data") if p.ndim and p.shape[0] % N == 0 else P(), params())
    options = {"weight_decay": 0.1} if name == "weight_decay" else {}
    tx = optax.chain(exchange(collective=gc.collectives.ReduceScatter(specs), **options), optax.sgd(0.1))
    tx = gc.accumulate(tx, axis_name="data", every=2) if name == "accumulate" else tx
    sentence = {"accumulate": r"accumulate by make_train_step\(", "weight_decay": "decay after the exchange"}[name]
    with pytest.raises(ValueError, match=sentence):
        take_a_step(tx, param_specs=specs)


def test_sharded_parameters_without_their_specs() -> None:
    specs = jax.tree.map(lambda p: P("data") if p.ndim and p.shape[0] % N == 0 else P(), params())
    assert P("data") in jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    with pytest.raises(
        ValueError, match=r"(?s)ReduceScatter\(param_specs\).*param_specs= of gradcomp_jax.hierarchical"
    ):
        take_a_step(chain(), param_specs=specs)


def test_a_hierarchy_without_the_specs_of_its_parameters() -> None:
    mesh = jax.make_mesh((2, 4), ("nodes", "data"))
    specs = jax.tree.map(lambda p: P("data") if p.ndim and p.shape[0] % 4 == 0 else P(), params())
    tx = gc.hierarchical(gc.dgc(axis_name="nodes", block=16), axis_name="nodes", inner_axis_name="data")
    both = ("nodes", "data")
    state = gc.init_state(params(), tx, mesh, axis_name=both, param_specs=specs)
    step = gc.make_train_step(loss, tx, mesh, axis_name=both, param_specs=specs)
    with pytest.raises(ValueError, match=r"param_specs= of gradcomp_jax.hierarchical"):
        step(state, jax.device_put(batch(0), gc.data_sharding(mesh, axis_name=both)))


COMPLEX = {
    "local_clip": lambda: gc.local_clip(1.0, axis_name=None),
    "weighted": lambda: gc.weighted(gc.dense(axis_name=None), axis_name=None),
    "dynamic_loss_scale": lambda: gc.dynamic_loss_scale(gc.dense(axis_name=None)),
    "accumulate": lambda: gc.accumulate(gc.dense(axis_name=None), axis_name=None, every=1),
    "delayed_average": lambda: gc.delayed_average(gc.dense(axis_name=None), axis_name=None, delay=1),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_gradients_do_not_lose_a_part(name: str) -> None:
    """An exchange within split_real_and_imaginary takes them; what is around both would cast them to float32."""
    tx, given = COMPLEX[name](), {"w": jnp.ones(3, jnp.complex64)}
    state = tx.init({"w": jnp.ones(3)})
    more = {"weight": 1.0} if name == "weighted" else {}
    with pytest.raises(
        TypeError, match=r"'w' is complex64.*put optax.contrib.split_real_and_imaginary around the whole chain"
    ):
        optax.with_extra_args_support(tx).update(given, state, {"w": jnp.ones(3)}, **more)


@pytest.mark.parametrize("method", [name for name in gc.methods.METHODS if hasattr(gc, name)])
def test_every_part_of_a_state_has_a_buffer_of_its_own(method: str) -> None:
    """A state that plain ``tx.init`` makes can be donated: no buffer is given away twice."""
    options = {"warm_up_steps": 3} if method == "one_bit_adam" else {}
    state = getattr(gc, method)(axis_name="data", **options).init(params())
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size]
    assert len(set(buffers)) == len(buffers)


def test_apply_if_finite() -> None:
    with pytest.raises(ValueError, match=r"optax.apply_if_finite.*leave the wrapper out"):
        take_a_step(optax.apply_if_finite(chain(), 3))
    _, metrics = take_a_step(optax.chain(exchange(), optax.apply_if_finite(optax.sgd(0.1), 3)))
    assert np.isfinite(metrics["loss"])


def test_without_donation_a_state_is_used_again() -> None:
    mesh, tx = mesh_of(N), chain()
    step = gc.make_train_step(loss, tx, mesh, donate=False)
    state = gc.init_state(params(), tx, mesh)
    first, second = (step(state, on(mesh, batch(0)))[1]["loss"] for _ in range(2))
    assert float(first) == float(second)
