"""Compresses the outer steps of MaxText's DiLoCo: ``python maxtext_outer.py METHOD [options of MaxText]``.

METHOD is ``maxtext`` (its own mean), ``dense``, ``int4`` or ``sparse_loco``. Prints the bytes that a device sends along the
axis ``diloco`` in a step, read from the compiled step, and the losses. No file of MaxText changes: while its train step is
traced, its functions that synchronize take the mean of movements by another function. For MaxText 0.2.5.
"""

import functools
import sys
from unittest import mock

import drjax
import jax
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
    large = tuple(name for name in mesh.axis_names if name != AXIS and mesh.shape[name] > 1)

    def spec(at):
        entries = [tuple(n for n in (e if isinstance(e, tuple) else (e,)) if n in large) for e in at.spec]
        return jax.P(*(e or None for e in entries))

    if large:
        specs = jax.tree.map(spec, shardings)
        method = gc.model_parallel(method, axis_name=AXIS, model_axis_name=large, param_specs=specs)
    return gc.unreduced(method, mesh, axis_name=AXIS)


def fragments(config, params):
    """Returns functions that cut a tree like the parameters into what MaxText synchronizes at once: all, or its fragments."""
    if not config.enable_streaming_diloco:
        return [lambda tree: tree]
    cut = diloco_utils.FragmentedTreeManipulator.create(params, config).get_flat_fragment
    return [functools.partial(cut, fragment_idx=number) for number in range(config.num_diloco_fragments)]


def compressed(own, exchanges):
    """Returns MaxText's function that synchronizes, with an exchange in the place of its mean of movements."""

    def synchronize(state, *args, mesh=None):
        outer, *kept = state.outer_opt_state
        # The arguments are the outer optimizer, or what cuts fragments, a fragment's number, and the outer optimizer.
        number = args[1] if args[1:] else 0

        def mean(moved):
            moved = jax.tree.map(lambda x: gc.PerDevice(x, 1, lifted=True), moved)
            mean, kept[number] = exchanges[number].update(moved, kept[number])
            return mean

        with mock.patch.object(drjax, "reduce_mean", mean):
            state = own(state.replace(outer_opt_state=outer), *args, mesh=mesh)
        return state.replace(outer_opt_state=(state.outer_opt_state, *kept))

    return synchronize


def replaced(exchanges):
    """Returns a context in which MaxText traces its train step with the exchanges; without any it is MaxText's own."""
    own = {name: getattr(diloco_utils, name) for name in ("synchronize_full_state", "synchronize_fragment_state")}
    ours = {name: compressed(function, exchanges) for name, function in own.items()}
    return mock.patch.multiple(diloco_utils, **(ours if exchanges else own))


def setup(argv, method):
    """Returns MaxText's config, what ``setup_train_loop`` returns, with the exchanges' state, and the exchanges."""
    config, recorder = train.initialize(argv)
    # The state is restored below, when it has its final structure.
    fresh = pyconfig.initialize(argv, enable_checkpointing=False, skip_jax_distributed_system=True)
    rng, _, shardings, model, mesh, *loop, state = train_utils.setup_train_loop(fresh, recorder)
    # A Variable at first, an array after a step: an array from the start, so that all steps are one program.
    state = state.replace(step=jax.tree.leaves(state.step)[0])
    exchanges = []
    if method is not None:
        kept, params = [], jax.tree.map(abstract, state.params, shardings.params)
        for cut in fragments(config, params):
            exchanges.append(outer_exchange(method, mesh, jax.tree.map(lambda x: x.sharding, cut(params))))
            kept.append(jax.jit(lambda params, cut=cut: exchanges[-1].init(cut(params)))(state.params))
        places = [jax.tree.map(lambda x: x.sharding, each) for each in kept]
        state = state.replace(outer_opt_state=(state.outer_opt_state, *kept))
        shardings = shardings.replace(outer_opt_state=(shardings.outer_opt_state, *places))
    manager = train_utils.create_checkpoint_manager(config, mesh, None)
    return config, (rng, manager, shardings, model, mesh, *loop, restored(config, manager, loop[1], state)), exchanges


def abstract(x, sharding=None):
    """Returns an array's shape, dtype and place, or another place."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)


def restored(config, manager, iterator, state):
    """Returns the state of MaxText's latest checkpoint, or this one."""
    if manager is None:
        return state
    found, _ = checkpointing.load_state_if_possible(
        manager,
        iterator,
        "",
        "",
        config.checkpoint_storage_concurrent_gb,
        jax.tree.map(abstract, state),
        dataset_type=config.dataset_type,
        expansion_factor_real_data=config.expansion_factor_real_data,
        maxtext_config=config,
    )
    return found["items"] if found else state


def compile_step(config, loop, exchanges):
    """Returns MaxText's train step, compiled; without exchanges it is MaxText's own."""
    rng, _, shardings, model, mesh, *_, state = loop
    batch = maxtext_utils.get_shaped_batch(config, batch_sharding=sharding.get_input_data_sharding(config, mesh))
    with replaced(exchanges), jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
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


def sent(step, mesh, config):
    """Returns the bytes that a device sends along the axis in a step, by what the step synchronizes."""
    branches = {"nothing": 0, "all": 1}
    if config.enable_streaming_diloco:
        # Counted from the end, fragment 0 is told from "nothing". That needs three fragments; of two it is left out.
        count = config.num_diloco_fragments
        branches = {"nothing": 0, **{f"fragment {n}": n or -count for n in range(count == 2, count)}}
    reports = {what: gc.wire_bytes(step, mesh=mesh, branch=branch) for what, branch in branches.items()}
    return {w: sum(r.sent_bytes for r in x.rows if r.axis is None or AXIS in r.axis) for w, x in reports.items()}


def main(argv):
    name, *options = argv[1:]
    config, loop, exchanges = setup([argv[0], *options], METHODS.get(name))
    step = compile_step(config, loop, exchanges)
    for what, count in sent(step, loop[4], config).items():
        print(f"{name}: {count:,} bytes along {AXIS!r} in a step that synchronizes {what}")
    _, losses = run(config, loop, step)
    print(f"{name}: losses", " ".join(f"{x:.4f}" for x in losses))


if __name__ == "__main__":
    main(sys.argv)
