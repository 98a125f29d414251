"""Refuses what a train step cannot take before JAX does, in sentences that name the remedy."""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from gradcomp_jax import _compat, _specs, per_device
from gradcomp_jax._errors import listed
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.per_device import is_per_device
from gradcomp_jax.transforms.worker_shards import ShardState


def refuse_donated(state: Any, *, called: str = "state") -> None:
    """Refuses a state whose memory an earlier step has taken: XLA would end the process."""
    leaves = jax.tree.leaves(state)
    gone = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and _compat.is_deleted(leaf)]
    if gone:
        path, _ = jax.tree_util.tree_leaves_with_path(state)[gone[0]]
        what = f"{path_name(path)!r} of this {called}" if path and len(gone) < len(leaves) else f"this {called}"
        raise ValueError(
            f"{what} was donated to an earlier step, which gave its memory to the new state: go on with the state that the"
            " step returned, or build the step with make_train_step(..., donate=False) to keep both"
        )


def refuse_unmarked(state: PyTree) -> None:
    """Refuses the state of an exchange as plain arrays, without the marks that say what they are."""
    if per_device.nodes_within(state, lambda node: isinstance(node, ExchangeState)):
        return
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        if "memory_ratio" in path_name(path).split("/"):
            raise ValueError(
                f"{path_name(path)!r} is of an exchange, and the tree has its arrays without what says which of them differ by"
                " worker: pass the optimizer's state itself; of a Flax NNX optimizer that is optimizer.opt_state, not"
                " flax.nnx.state(optimizer)"
            )


def refuse_unmapped(state: PyTree, mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses per-device state of one worker, as ``tx.init`` makes it outside the axis, and of another number of workers.

    Also refuses a hierarchy whose axes the step has in another order: the rows of its state would be taken for other devices'.
    """
    names = _specs.names_of(axis_name)
    for node in per_device.nodes_within(state, lambda node: isinstance(node, ShardState)):
        mapped = tuple(name for name in names if name in node.axes)
        if len(mapped) == len(node.axes) and mapped != node.axes:
            raise ValueError(
                f"the workers lie along {axis_name!r}, and an exchange of their shards along {node.axes}: give axis_name the"
                " axis between workers first, here and where the state is made"
            )
    devices = _specs.devices_along(mesh, axis_name)
    # A worker may be several devices, along axes of the mesh that are not the exchange's.
    others = [size for name, size in mesh.shape.items() if name not in names]
    possible = {devices * math.prod(some) for n in range(len(others) + 1) for some in itertools.combinations(others, n)}
    for node in per_device.nodes_of(state, is_per_device):
        rows, expected = node.value.shape[0], devices * node.held(max(1, devices // node.shards))
        fitting = [n for n in range(1, rows + 1) if rows == n * node.shards * node.held(n)]
        if not fitting or rows == expected or any(n * node.shards in possible for n in fitting):
            continue
        if rows == node.held(1):
            raise ValueError(
                f"a part of the optimizer's state has the {rows} rows of one worker, and {devices} devices along {axis_name!r}"
                f" hold {expected} between them: tx.init(params) was called outside the axis; make the state with"
                " gradcomp_jax.init_state(params, tx, mesh), or, for a loop of your own, with gradcomp_jax.init_opt_state"
            )
        old, new = fitting[0], max(1, devices // node.shards)
        raise ValueError(
            f"the state is of {old} workers, and the mesh has {new} along {axis_name!r}: save it and restore it into"
            f" init_state(params, tx, mesh), or place gradcomp_jax.resize_workers(state, old={old}, new={new}) with"
            " gradcomp_jax.state_shardings"
        )


def refuse_unplaced(batch: PyTree, mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses a batch that the workers cannot divide, or that is not split over them along an Explicit axis."""
    names = _specs.names_of(axis_name)
    workers, types = _specs.devices_along(mesh, axis_name), dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = all(types[name] == AxisType.Explicit for name in names)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = f" {path_name(path)!r}" if path else ""
        if not jnp.ndim(leaf):
            raise ValueError(
                f"the batch{where} is one number, and batches are divided over {axis_name!r}: close over it"
            )
        if leaf.shape[0] % workers:
            raise ValueError(
                f"{workers} devices along {axis_name!r} do not divide the batch{where} of {leaf.shape[0]}: choose a multiple,"
                " or fill it up with examples of weight 0 (gradcomp_jax.weighted)"
            )
        spec = jax.typeof(leaf).sharding.spec if explicit else ()
        if explicit and (not spec or _specs.names_of(spec[0]) != names):
            raise ValueError(
                f"the batch{where} is not split over {axis_name!r}, an axis of Explicit type: place it with"
                f" jax.device_put(batch, gradcomp_jax.data_sharding(mesh, axis_name={axis_name!r}))"
            )


def refuse_no_loss(found: Any, has_aux: bool) -> None:
    """Refuses what a loss returns if it is not a real scalar, or has an unannounced second value."""
    if has_aux and not (isinstance(found, (tuple, list)) and len(found) == 2):
        raise TypeError("has_aux=True is for a loss that returns (loss, aux), a pair: return it, or leave has_aux out")
    value = found[0] if has_aux else found
    if isinstance(value, (tuple, list, dict)):
        raise TypeError(
            f"the loss returns a {type(value).__name__}, and what is differentiated is one number: with something beside it,"
            " return (loss, aux) and give has_aux=True"
        )
    if value is None or jnp.shape(value):
        got = "None" if value is None else f"an array of shape {jnp.shape(value)}"
        raise TypeError(f"the loss returns {got}, and must return one number: the mean over its batch, jnp.mean(...)")
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(
            f"the loss is {jnp.result_type(value)}, and must be a real floating-point number: its mean, or real part"
        )


def refuse_no_arrays(params: PyTree) -> None:
    """Refuses parameters that contain functions, strings or other objects that are not arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")) and not isinstance(
            leaf, (bool, int, float, complex)
        ):
            raise TypeError(
                f"the parameter {path_name(path) or '(all)'!r} is no array but a {type(leaf).__name__}: take the arrays out"
                " first, by params, static = eqx.partition(model, eqx.is_inexact_array), and put the model together in the"
                " loss, by model = eqx.combine(params, static); of a Flax NNX model, by nnx.split and nnx.merge"
            )


def refuse_unread(weight: Any, reads: list[bool]) -> None:
    """Refuses a weight that nothing has read: all workers would have counted the same."""
    if weight is not None and not reads:
        raise ValueError(
            "weight= did not come to a gradcomp_jax.weighted, and all workers would count alike: put one around the method, and"
            " nothing around it that passes no extra arguments on, such as optax.contrib.split_real_and_imaginary"
        )


def refuse_updates(updates: PyTree, params: PyTree, axis_name: AxisName) -> None:
    """Refuses an update that does not fit its parameter: of another shape, or differing by worker if the parameter does not."""
    tracked = _compat.tracks_varying(axis_name)
    leaves = zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True)
    for (path, update), param in leaves:
        if update.shape != param.shape:
            raise ValueError(
                f"the update of {path_name(path)!r} has the shape {update.shape}, and a device's shard of the parameter"
                f" {param.shape}: give the exchange the parameters' specs too, with collective="
                "gradcomp_jax.collectives.ReduceScatter(param_specs) along its own axis, or param_specs= of"
                " gradcomp_jax.hierarchical along the inner one; both go with make_train_step(param_specs=...)"
            )
        if tracked and (names := _differing(update, param, axis_name)):
            raise ValueError(
                listed(
                    f"the update of {path_name(path)!r} differs by worker over {names}, because no exchange averages its"
                    " gradient",
                    "put an exchange such as gradcomp_jax.dgc(axis_name=...) into the optax chain, outside optax.masked or with"
                    " that leaf in its mask",
                    "freeze the leaf with gradcomp_jax.set_to_zero(): zeros of optax.set_to_zero() count as each worker's own",
                    "what reads the gradient around an exchange, such as optax.contrib.sam or mechanize, goes after it:"
                    " optax.chain(exchange, sam(...))",
                )
            )


def refuse_own_state(after: PyTree, before: PyTree, axis_name: AxisName) -> None:
    """Refuses an optimizer's state that differs by worker and is not per-device, such as that of a link before an exchange."""
    if not _compat.tracks_varying(axis_name):
        return
    leaves = jax.tree_util.tree_leaves_with_path(after, is_leaf=is_per_device)
    for (path, new), old in zip(leaves, jax.tree.leaves(before, is_leaf=is_per_device), strict=False):
        if is_per_device(new) or not (names := _differing(new, old, axis_name)):
            continue
        raise ValueError(
            f"{path_name(path)!r} of the optimizer's state differs by worker over {names}: what keeps it goes before the"
            " exchange, and sees each worker's own gradient. Put it after the exchange, where it sees the mean; a momentum of"
            " each worker's own is gradcomp_jax.memory.momentum_correction(), which gradcomp_jax.dgc has"
        )


def _differing(new: Any, old: Any, axis_name: AxisName) -> str:
    """Returns the names of the axis along which only the new value differs by worker; empty if there is none."""
    before = _compat.varying_along(old, axis_name)
    return ", ".join(repr(name) for name in _compat.varying_along(new, axis_name) if name not in before)


def refuse_averaged(loss: Any, axis_name: AxisName | None, *, lanes: bool = False) -> None:
    """Refuses a loss that the workers have averaged or added up: each worker's gradient would be 1/N of its own."""
    same = _compat.tracks_varying(axis_name) and not _compat.is_varying(loss, axis_name)
    if same or (lanes and _compat.is_mapped(loss, axis_name) is False):
        raise ValueError(
            f"the loss is the same on all workers: it is averaged or added up over {axis_name!r} inside, and its gradient"
            " would be divided by their number twice. Return each worker's own mean, without jax.lax.pmean"
        )


def refuse_no_lanes(mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses a mesh over which ``vmap`` cannot map the workers."""
    if len(_specs.names_of(axis_name)) > 1 or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"by='vmap' takes workers along one axis of a mesh of Auto type, got {axis_name!r} of {mesh.axis_types}: leave by="
            " out"
        )


@contextlib.contextmanager
def constraints_explained(axis_name: AxisName) -> Iterator[None]:
    """Adds a remedy to errors of JAX about sharding constraints in a loss."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        if "spmd_axis_name" in said and "with_sharding_constraint" in said:
            raise ValueError(
                f"a constraint in the loss names {axis_name!r}, and arrays there are one worker's own: leave that axis out of"
                f" the loss's constraints, or out of the trainer's logical axis rules. {said}"
            ) from error
        if "should be of type `Manual`" in said:
            raise ValueError(
                f"a sharding in the loss is of the whole mesh, whose axis {axis_name!r} is mapped here: take"
                f" gradcomp_jax.local_value_and_grad(..., mesh=mesh, by='vmap'). {said}"
            ) from error
        raise


def refuse_no_batch(args: tuple[PyTree, ...], is_batch: Callable[[Any], bool]) -> None:
    """Refuses positional arguments that would be divided along their first dimension but are not part of the batch."""
    found = [sorted({leaf.shape[0] for leaf in jax.tree.leaves(arg) if is_batch(leaf)}) for arg in args]
    found = [sizes for sizes in found if sizes]
    other = next((sizes for sizes in found if sizes != found[0]), None)
    if other:
        first, second = (" and ".join(map(str, sizes[:3])) for sizes in (found[0], other))
        raise ValueError(
            f"positional arrays are the batch, and are divided along their first dimension, which is {first} in one argument"
            f" and {second} in another: pass what is no batch by keyword (statistics, weights of classes, frozen parameters),"
            " and keys as jax.random.key makes them"
        )


CHOICE = (
    "a wrapper around the exchange, such as optax.apply_if_finite, chooses on each worker by itself between the update of all"
    " and another. An exchange skips a gradient that is not finite by itself, on all workers together (`skipped` in its state),"
    " and replicas drop it: leave the wrapper out, or put it around what comes after the exchange"
)


_GIVE = (
    "a transformation of the chain reads it. Give it to update, as in tx.update(gradient, state, params, value=loss), the same"
    " on all workers; make_train_step gives value=, the mean loss"
)

_EVALUATES = (
    "a line search, as in optax.lbfgs, evaluates the loss itself, which a step does not give it, and each worker would do so on"
    " a batch of its own. Take an optimizer without one, such as optax.lbfgs(learning_rate, linesearch=None) or optax.adam"
)


@contextlib.contextmanager
def update_explained(axis_name: AxisName, extra: Iterable[str] = ()) -> Iterator[None]:
    """Adds a remedy to errors of JAX and optax about the axis, branches and extra arguments of a chain's update."""
    try:
        yield
    except (NameError, TypeError) as error:
        said = str(error)
        if isinstance(error, NameError) and "is not bound here" in said:
            raise NameError(
                f"the workers lie along {axis_name!r}, and an exchange is over an axis that is not mapped: give both the same"
                f" axis_name. {said[0].upper()}{said[1:]}"
            ) from error
        if "branches must have equal output types" in said:
            raise ValueError(
                f"{CHOICE}. What chooses by the loss of a replica, such as optax.contrib.reduce_on_plateau, needs"
                " make_train_step(..., check_vma=False)"
            ) from error
        if needs := re.search(r"missing \d+ required keyword-only arguments?: (.*)", said):
            raise TypeError(f"{said}: {_EVALUATES if 'value_fn' in needs[1] else _GIVE}") from error
        if any(f"unexpected keyword argument '{name}'" in said for name in extra):
            raise TypeError(
                f"{said}: a step gives every part of the chain what optax calls extra arguments, such as value=, the loss. Put"
                " optax.GradientTransformation(tx.init, tx.update) around the part that does not take them"
            ) from error
        raise
