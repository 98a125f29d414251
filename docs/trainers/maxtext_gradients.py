"""Compresses gradients between replicas of MaxText: ``python maxtext_gradients.py METHOD [options of MaxText]``.

METHOD is ``maxtext`` (its own train step), ``dense`` or ``int4``. Replicas lie along the mesh axis ``diloco``, which MaxText
leaves idle without ``enable_diloco``; for ``maxtext`` they lie along ``data``. Prints the bytes that a device sends along that
axis in a step, read from the compiled step, and the losses. Nothing of MaxText is replaced. For MaxText 0.2.5.
"""

import sys

import jax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, sharding, train_utils
from maxtext_outer import AXIS, METHODS, outer_exchange, restored

import gradcomp_jax as gc


def compressed_step(graph, config, exchange, place):
    """Returns a train step of each replica's gradient, for a dense model without dropout or accumulation of gradients."""
    place = jax.NamedSharding(place.mesh, jax.P(AXIS, *place.spec))

    def step(state, kept, batch):
        state = nnx.merge(graph, state)
        model, params, rest = nnx.split(state.model, nnx.Param, ...)

        def loss(params, batch):
            return train.loss_fn(nnx.merge(model, params, rest, copy=True), config, batch, None, None)[0]

        batch = jax.tree.map(lambda x: x.reshape(config.num_diloco_replicas, -1, *x.shape[1:]), batch)
        batch = jax.lax.with_sharding_constraint(batch, place)
        of_replicas = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0), spmd_axis_name=AXIS)
        losses, grads = of_replicas(params, batch)
        grads = jax.tree.map(lambda g: gc.PerDevice(g, 1, lifted=True), grads.to_pure_dict())
        mean, kept = exchange.update(grads, kept, params.to_pure_dict())
        mean = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(mean))
        if config.gradient_clipping_threshold > 0:
            mean = maxtext_utils.apply_gradient_clipping(mean, None, config.gradient_clipping_threshold)
        state.apply_gradients(mean)
        return nnx.state(state, nnx.Not(nnx.Intermediate)), kept, losses.mean()

    return step


def own_step(graph, config, shardings):
    """Returns MaxText's train step in the form of the other."""

    def step(state, kept, batch):
        _, params, _ = nnx.split(shardings.model, nnx.Param, ...)
        state, metrics = train.train_step(graph, config, shardings, params, state, batch)
        return state, kept, metrics["scalar"]["learning/loss"]

    return step


def setup(argv, method):
    """Returns MaxText's config, what a run needs of MaxText, with the exchange's state, and the exchange."""
    config, recorder = train.initialize(argv)
    # What is restored below has the exchange's state in it.
    fresh = pyconfig.initialize(argv, enable_checkpointing=False, skip_jax_distributed_system=True)
    _, _, shardings, _, mesh, _, iterator, loader, rampup, _, state = train_utils.setup_train_loop(fresh, recorder)
    graph, state = nnx.split(state)
    exchange, kept = None, ()
    if method is not None:
        _, params, _ = nnx.split(state.model, nnx.Param, ...)
        _, places, _ = nnx.split(shardings.model, nnx.Param, ...)
        exchange = outer_exchange(method, mesh, places.to_pure_dict())
        kept = jax.jit(exchange.init)(params.to_pure_dict())
    manager = train_utils.create_checkpoint_manager(config, mesh, None)
    saved = restored(config, manager, iterator, {"state": state.to_pure_dict(), "exchange": kept})
    nnx.replace_by_pure_dict(state, saved["state"])
    return config, (manager, shardings, graph, mesh, iterator, loader, rampup, state, saved["exchange"]), exchange


def compile_step(config, loop, exchange):
    """Returns the train step, compiled; without an exchange it is MaxText's own."""
    _, shardings, graph, mesh, *_, state, kept = loop
    place = sharding.get_input_data_sharding(config, mesh)
    own = own_step(graph, config, shardings)
    step = own if exchange is None else compressed_step(graph, config, exchange, place)
    batch = maxtext_utils.get_shaped_batch(config, batch_sharding=place)
    placed = (shardings, jax.tree.map(lambda x: x.sharding, kept), None)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=placed).lower(state, kept, batch).compile()


def run(config, loop, step):
    """Trains to ``config.steps``; returns the state, with the exchange's, and the losses of the steps."""
    manager, _, _, _, iterator, loader, rampup, state, kept = loop
    losses = []
    for number in range(int(state.optimizer.step[...]), config.steps):
        state, kept, loss = step(state, kept, loader.load_next_batch(rampup_manager=rampup))
        losses.append(float(loss))
        if manager is not None and (number + 1 == config.steps or number % config.checkpoint_period == 0):
            items = {"state": state.to_pure_dict(), "exchange": kept}
            checkpointing.save_checkpoint(manager, number, items, config, iterator, force=True)
    if manager is not None:
        checkpointing.wait_until_finished(manager)
    return (state, kept), losses


def sent(step, mesh, axis=AXIS):
    """Returns the bytes that a device sends along the axis in a step, and all that it sends."""
    report = gc.wire_bytes(step, mesh=mesh)
    return sum(row.sent_bytes for row in report.rows if row.axis is None or axis in row.axis), report.sent


def main(argv):
    name, *options = argv[1:]
    config, loop, exchange = setup([argv[0], *options], METHODS.get(name))
    step, axis = compile_step(config, loop, exchange), AXIS if exchange else "data"
    along, whole = sent(step, loop[3], axis)
    print(f"{name}: {along:,} bytes along {axis!r} in a step, {whole:,} in all")
    _, losses = run(config, loop, step)
    print(f"{name}: losses", " ".join(f"{x:.4f}" for x in losses))


if __name__ == "__main__":
    main(sys.argv)
