"""Compresses the outer steps of MaxText's DiLoCo: ``python maxtext_outer.py METHOD [options of MaxText]``.

METHOD is ``maxtext`` (its own mean), ``dense``, ``int4`` or ``sparse_loco``. Prints the bytes that a device sends along the
axis ``diloco`` in a step, read from the compiled step, and the losses. No file of MaxText changes: while its train step is
traced, ``synchronize_full_state`` of the module ``maxtext.trainers.diloco.utils`` is another function. For MaxText 0.2.5.
"""

import sys
from unittest import mock

import drjax
import jax
import optax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.trainers.diloco import utils as diloco_utils
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, sharding, train_utils

import gradcomp_jax as gc

AXIS = "diloco"
METHODS = {
    "dense": gc.dense(axis_name=AXIS),
    "int4": gc.block_quantized(axis_name=AXIS, bits=4),
    # SparseLoCo's exchange; the paper's outer optimizer is diloco_outer_lr=1 diloco_outer_momentum=0.
    "sparse_loco": gc.exchange(
        gc.compressors.topk(1 / 64, block=4096, bits=2, pack_positions=True),
        axis_name=AXIS,
        memory=gc.memory.residual(decay=0.95),
        collective="all_gather",
    ),
}


def outer_exchange(method, mesh, shardings):
    """Returns the method on each device's shard of the parameters, for movements [N, ...] outside of the axis."""
    large = {name for name in mesh.axis_names if mesh.shape[name] > 1} - {AXIS}
    if len(large) > 1:
        raise ValueError(f"this recipe takes one axis beside {AXIS!r} that is longer than 1, got {sorted(large)}")

    def spec(at):
        entries = [[n for n in (e if isinstance(e, tuple) else (e,)) if n in large] for e in at.spec]
        return jax.P(*(e[0] if e else None for e in entries))

    if large:
        specs = jax.tree.map(spec, shardings)
        method = gc.model_parallel(method, axis_name=AXIS, model_axis_name=large.pop(), param_specs=specs)
    return gc.unreduced(method, mesh, axis_name=AXIS)


def compressed(exchange):
    """Returns MaxText's ``synchronize_full_state`` with the exchange in the place of the mean."""

    def synchronize_full_state(state, outer_optimizer, mesh=None):
        outer, kept = state.outer_opt_state
        _, inner, _ = nnx.split(state.inner_state.model, nnx.Param, ...)
        moved = jax.tree.map(lambda c, x: gc.PerDevice(c - x, 1, lifted=True), state.params, inner.to_pure_dict())
        mean, kept = exchange.update(moved, kept, state.params)
        updates, outer = outer_optimizer.update(mean, outer, state.params)
        params = optax.apply_updates(state.params, updates)
        replicas = drjax.map_fn(
            lambda s: diloco_utils.replace_nnx_model_params(s, params), state.inner_state, mesh=mesh
        )
        return state.replace(params=params, outer_opt_state=(outer, kept), inner_state=replicas)

    return synchronize_full_state


def setup(argv, method):
    """Returns MaxText's config, what ``setup_train_loop`` returns, with the exchange's state, and the exchange."""
    config, recorder = train.initialize(argv)
    # The state is restored below, when it has its final structure.
    fresh = pyconfig.initialize(argv, enable_checkpointing=False, skip_jax_distributed_system=True)
    rng, _, shardings, model, mesh, *loop, state = train_utils.setup_train_loop(fresh, recorder)
    # A Variable at first, an array after a step: an array from the start, so that all steps are one program.
    state = state.replace(step=jax.tree.leaves(state.step)[0])
    exchange = None
    if method is not None:
        exchange = outer_exchange(method, mesh, shardings.params)
        kept = jax.jit(exchange.init)(state.params)
        state = state.replace(outer_opt_state=(state.outer_opt_state, kept))
        places = jax.tree.map(lambda x: x.sharding, kept)
        shardings = shardings.replace(outer_opt_state=(shardings.outer_opt_state, places))
    manager = train_utils.create_checkpoint_manager(config, mesh, None)
    if manager is not None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored, _ = checkpointing.load_state_if_possible(
            manager,
            loop[1],
            "",
            "",
            config.checkpoint_storage_concurrent_gb,
            shapes,
            dataset_type=config.dataset_type,
            expansion_factor_real_data=config.expansion_factor_real_data,
            maxtext_config=config,
        )
        state = restored["items"] if restored else state
    return config, (rng, manager, shardings, model, mesh, *loop, state), exchange


def compile_step(config, loop, exchange):
    """Returns MaxText's train step, compiled; without an exchange it is MaxText's own."""
    rng, _, shardings, model, mesh, *_, state = loop
    batch = maxtext_utils.get_shaped_batch(config, batch_sharding=sharding.get_input_data_sharding(config, mesh))
    own = diloco_utils.synchronize_full_state if exchange is None else compressed(exchange)
    replaced = mock.patch.object(diloco_utils, "synchronize_full_state", own)
    with replaced, jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        step, _ = train_utils.jit_train_and_eval_step(
            config, model, mesh, state, shardings, train.train_step, params_shardings=shardings.params
        )
        return step.lower(state, batch, rng).compile()


def run(config, loop, step):
    """Trains to ``config.steps``; returns the state and the losses of the steps, the mean of the replicas'."""
    rng, manager, _, _, _, _, iterator, loader, rampup, _, state = loop
    losses = []
    for number in range(int(state.step), config.steps):
        batch = loader.load_next_batch(rampup_manager=rampup)
        state, metrics = step(state, batch, jax.jit(jax.random.fold_in)(rng, number))
        every = [metrics["scalar"][f"learning/loss_island_{i}"] for i in range(config.num_diloco_replicas)]
        losses.append(sum(map(float, every)) / len(every))
        checkpointing.maybe_save_checkpoint(manager, state, config, iterator, number)
    if manager is not None:
        checkpointing.maybe_save_checkpoint(manager, state, config, iterator)
        checkpointing.wait_until_finished(manager)
    return state, losses


def sent(step, mesh, *, syncs):
    """Returns the bytes that a device sends along the axis in a step that synchronizes, or in one that does not."""
    report = gc.wire_bytes(step, mesh=mesh, branch=int(syncs))
    return sum(row.sent_bytes for row in report.rows if row.axis is None or AXIS in row.axis)


def main(argv):
    name, *options = argv[1:]
    config, loop, exchange = setup([argv[0], *options], METHODS.get(name))
    step = compile_step(config, loop, exchange)
    on, off = (sent(step, loop[4], syncs=syncs) for syncs in (True, False))
    print(f"{name}: {on:,} bytes along {AXIS!r} in a step that synchronizes, {off:,} in another")
    _, losses = run(config, loop, step)
    print(f"{name}: losses", " ".join(f"{x:.4f}" for x in losses))


if __name__ == "__main__":
    main(sys.argv)
