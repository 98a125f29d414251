"""A data-parallel train step around any optax chain with an exchange in it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from gradcomp_jax import _arguments, _compat, _specs, _tracking, per_device
from gradcomp_jax._checks import typed_key
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.core import ExchangeState
from gradcomp_jax.core.context import with_context
from gradcomp_jax.core.overwritten import refuse_misplaced, trained_order
from gradcomp_jax.replicas import MARKED
from gradcomp_jax.replicas.nonfinite import dropped, restored
from gradcomp_jax.training import applied, calls, overwriting, refusals, seen
from gradcomp_jax.training.diagnostics import diagnostics as diagnose
from gradcomp_jax.training.donation import OwnBuffers
from gradcomp_jax.training.gathered import whole_params
from gradcomp_jax.training.gradients import worker_value_and_grad
from gradcomp_jax.training.observed import as_metric, next_model_state, observed
from gradcomp_jax.training.order import refuse_lookahead
from gradcomp_jax.training.other_chain import updated
from gradcomp_jax.training.pinned import PinWatch, refuse_whole
from gradcomp_jax.training.state import (
    along_axis,
    check_axis,
    has_replicas,
    lift_replicas,
    manual_specs,
    model_field,
    state_specs,
    with_parts,
)
from gradcomp_jax.transforms import loss_scale, participation, skipped
from gradcomp_jax.transforms.bucketed import forward_order
from gradcomp_jax.transforms.skipping import SkipWatch


@_arguments.checked
def make_train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    aux: PyTree = "auto",
    accumulate: int = 1,
    rngs: Any = None,
    donate: bool = True,
    check_vma: bool = True,
    param_specs: PyTree | None = None,
    param_compressor: Compressor | None = None,
    mean_metrics: bool = True,
    diagnostics: bool = False,
    weight: Callable[[PyTree], Any] | None = None,
) -> Any:
    """Compiles ``step(state, batch) -> (state, metrics)``: local gradients, exchange, update.

    The step also depends on the state: replicas, a model state, a loss scale (:func:`gradcomp_jax.dynamic_loss_scale`).

    Parameters may have Flax's collection ``_overwrite_with_gradient`` beside them, the scales and histories of fp8:
    ``{"params": ..., "_overwrite_with_gradient": ...}``. ``tx`` is then for ``"params"`` only, and the collection takes the
    largest of the new values of all micro-batches and workers, at the cost of an all-reduce of its size. A leaf does not change
    if that value is not finite, and the collection does not change in a step that is skipped. Replicas each keep their own.

    Example:
        >>> tx = optax.chain(gc.block_quantized(axis_name="data"), optax.sgd(0.1))
        >>> step = gc.make_train_step(loss, tx, mesh)
        >>> state, metrics = step(gc.init_state(params, tx, mesh), batch)
        >>> int(state.step), int(metrics["skipped"])
        (1, 0)

    Args:
        loss: ``loss(params, batch) -> scalar``, the mean over the batch it sees; ``(scalar, aux)`` with ``has_aux``. It is
            also given ``rngs=`` and, if the state has a model state, ``model_state=``, and then returns
            ``(scalar, model_state)`` or ``(scalar, (aux, model_state))``. That model state is averaged over the workers unless
            each has its own (:func:`init_state`); one that is not finite is ignored.
        tx: an optax transformation that averages over ``axis_name``, such as ``optax.chain(gc.dgc(...), optax.sgd(0.1))``. It
            is given ``value=``, the mean loss, which ``optax.contrib.reduce_on_plateau`` reads; with replicas a worker's own
            loss, and with ``mean_metrics=False`` no value, unless there are replicas. If the class of the state has its own
            ``apply_gradients``, that is called, with this as ``self.tx`` and a worker's own gradient as ``grads``.
        mesh: the mesh of :func:`init_state`.
        axis_name: the axis of the workers.
        has_aux: whether ``loss`` returns ``aux``; ``metrics["aux"]`` combines that of all workers.
        aux: how it is combined, as for :func:`local_value_and_grad`: floats are averaged, signed integers added up, and an
            array with one entry an example is joined in batch order and split along the axis, unless this says otherwise.
        accumulate: micro-batches that a worker processes before the exchange, as for :func:`local_value_and_grad`. A step sends
            as many bytes as with one.
        rngs: a seed or a key: the loss gets ``rngs=``, a typed key for this step, worker and micro-batch. A run that
            continues from a checkpoint draws the same numbers.
        donate: the new state takes the old one's memory; the old one must not be used again. Arrays of it that share a
            buffer, such as tied weights, are copied before, and are separate from then on.
        check_vma: as for ``jax.shard_map``. A loss that only the tracking refuses, such as one whose loop starts with a
            constant, is differentiated without tracking in either case.
        param_specs: the specs of :func:`init_state`. Parameters that lie along the axis of the workers (FSDP) are gathered for
            the loss, and ``tx`` is given their whole gradients and returns updates of the shards
            (:func:`gradcomp_jax.hierarchical`, :func:`gradcomp_jax.collectives.ReduceScatter`). Axes of the mesh that are not
            ``axis_name`` are left to the compiler; with parameters along one of them see :func:`gradcomp_jax.model_parallel`.
        param_compressor: encodes parameters that are gathered along the axis of the workers, see :func:`gather_params`; none by
            default. For a state with a ``param_copy`` (:func:`init_state`), the differences from that are sent.
        mean_metrics: whether ``metrics`` are means over the workers, which costs an all-reduce of a few bytes: on links of high
            latency as much as the exchange. Otherwise they are the workers' own, ``[N]``, split along the axis; examples are
            joined in any case.
        diagnostics: whether ``metrics`` has :func:`gradcomp_jax.diagnostics` of the new state too, for an all-reduce of two
            numbers.
        weight: ``weight(batch) -> number``, what a worker counts for with its part of the batch, such as the number of examples
            that are not padding; 0 for a worker that is absent. :func:`gradcomp_jax.weighted` in ``tx`` reads it. Means of the
            loss, of ``aux`` and of a model state's floats are then weighted too, and an absent worker is ignored; if all are
            absent, the loss is NaN. With ``accumulate`` it is called for each micro-batch, and a worker counts for the sum:
            the result is the weighted mean over everything, however it is divided.

    Returns:
        A jitted function. ``state`` is a :class:`TrainState`, or one with ``replace`` such as flax's, from :func:`init_state`;
        the new one has the same type. ``batch`` is a tree whose leaves have the global batch as their first dimension, a
        multiple of the number of workers. ``metrics["loss"]`` is the mean loss, float32, and ``metrics["skipped"]`` how many
        exchanges were skipped so far because a gradient was not finite; with replicas ``metrics["dropped"]`` is how many
        updates a worker has left out for that reason, without a change of its optimizer's state.
        ``step.lower(state, batch).compile()`` is what :func:`gradcomp_jax.wire_bytes` reads. On CPU devices a step returns when
        the one before the last is done, because XLA's collectives there starve when many steps queue up; on other platforms it
        does not wait. If exchanges are skipped in 25 steps in a row, one warning says so.

    Raises:
        ValueError: if the mesh has no such axis, or for a ``param_compressor`` without ``param_specs`` or that
            :func:`gather_params` does not take; when traced, if the state was not initialised on the mesh, an Explicit mesh's
            batch is not split, ``accumulate`` does not divide a worker's batch, or the update of a parameter has another shape
            than its shard, or differs by worker because no exchange averages its gradient; when called, if the state was
            donated before.
    """
    check_axis(mesh, axis_name)
    if param_compressor is not None and param_specs is None:
        raise ValueError("param_compressor is for parameters along the axis of the workers: give their param_specs")
    local = worker_step(
        loss,
        tx,
        axis_name=axis_name,
        has_aux=has_aux,
        aux=aux,
        accumulate=accumulate,
        rngs=rngs,
        param_specs=param_specs,
        param_compressor=param_compressor,
        mean_metrics=mean_metrics,
        weight=weight,
    )

    def step(state: Any, batch: PyTree) -> tuple[Any, dict[str, Any]]:
        calls.refuse_no_state(state)
        refusals.refuse_unmapped(state.opt_state, mesh, axis_name)
        refuse_misplaced(state.params)
        refuse_whole(state, mesh, axis_name)
        refusals.refuse_unplaced(batch, mesh, axis_name)
        manual = None if has_replicas(state) else manual_specs(param_specs, state.params, axis_name)
        specs = state_specs(state, axis_name=axis_name, param_specs=manual)
        by_worker = PartitionSpec(axis_name)
        out_specs = (specs, PartitionSpec() if mean_metrics else by_worker, by_worker)
        mapped = _specs.mapped(local, mesh, axis_name, (specs, by_worker), out_specs, check_vma=check_vma)
        new, metrics, examples = mapped(state, batch)
        metrics = seen.together(metrics, dict.fromkeys(metrics) | examples)
        return new, metrics | (diagnose(new) if diagnostics else {})

    jitted = jax.jit(step, donate_argnums=(0,) if donate else ())
    return TrainStep(jitted, mesh, donates=donate, pins=PinWatch(mesh, axis_name))


def worker_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    axis_name: AxisName,
    has_aux: bool = False,
    aux: PyTree = "auto",
    accumulate: int = 1,
    rngs: Any = None,
    param_specs: PyTree | None = None,
    param_compressor: Compressor | None = None,
    mean_metrics: bool = True,
    weight: Callable[[PyTree], Any] | None = None,
) -> Callable[[Any, PyTree], tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Returns one worker's part of a step of :func:`make_train_step`, to be mapped over the axis; it has the same arguments.

    The function returns the metrics in two parts: numbers, and arrays with one entry an example.
    """
    names = _specs.names_of(axis_name)
    value_and_grad = worker_value_and_grad(
        functools.partial(observed, loss, has_aux),
        axis_name=axis_name,
        has_aux=True,
        aux=lambda found: {name: {"loss": "mean", "model_state": seen.STATE, "aux": aux}[name] for name in found},
        accumulate=accumulate,
        weight=weight,
    )
    key = None if rngs is None else typed_key("rngs", rngs)

    def local(state: Any, batch: PyTree) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        replicas, field = has_replicas(state), model_field(state)
        model_state = getattr(state, field) if field else None
        if replicas:
            state = per_device.lower(state)
        given: dict[str, Any] = {"rngs": key, "model_state": per_device.lower(model_state)}
        given = {name: value for name, value in given.items() if value is not None}
        if key is not None:
            given["rngs"] = jax.random.fold_in(jax.random.fold_in(key, state.step), lax.axis_index(axis_name))
        params, copies = whole_params(state, param_specs, names, param_compressor)
        found = value_and_grad(params, batch, scale=loss_scale(state.opt_state), given=given)
        extra, reads, share = {}, list[bool](), None
        if found.weight is not None:
            extra["weight"] = found.weight
            share = participation.share_of(found.weight, axis_name)
        metrics, kinds = dict(found.aux), [kind for kind in found.kinds() if kind != seen.STATE]
        model_seen = metrics.pop("model_state", None)
        metrics, examples = seen.parted(kinds, metrics)
        metrics = jax.tree.map(as_metric, metrics)
        kinds = [kind for kind in kinds if kind != "examples"]
        if replicas:
            extra["value"] = metrics["loss"]
        elif mean_metrics:
            metrics = seen.over_workers(kinds, metrics, axis_name, share=share)
            extra["value"] = metrics["loss"]
        # Computed only if the exchange asks for it, because it costs another trace of the loss.
        extra = with_context(
            extra,
            forward_order=lambda: trained_order(
                forward_order(_tracking.unless_refused(loss, axis_name), params, batch, **given), params
            ),
            weight_read=lambda: reads.append(True),
        )

        def update(gradient: PyTree, before: PyTree, params: PyTree, **more: Any) -> tuple[PyTree, PyTree]:
            refuse_lookahead(before, in_a_step=True)
            updates, after = updated(tx, gradient, before, params, {**extra, **more}, axis_name)
            refusals.refuse_unread(weight, reads)
            if replicas:
                return updates, restored(after, before, (ExchangeState, *MARKED))
            refusals.refuse_updates(updates, params, axis_name)
            refusals.refuse_own_state(after, before, axis_name)
            return updates, after

        def next_field() -> PyTree:
            return next_model_state(model_state, model_seen, axis_name, share=share)

        over = None if replicas else axis_name
        new = applied.applied(
            state,
            overwriting.heard(found.gradient, state.params, over, weight=found.weight),
            update,
            whole=lambda: not replicas and not along_axis(param_specs, state.params, axis_name),
            given={field: next_field} if field else {},
        )
        new = overwriting.kept_if_skipped(new, state, dropped if replicas else skipped)
        opt_state = new.opt_state
        if replicas:
            metrics["dropped"] = jnp.asarray(dropped(opt_state), jnp.float32)
            if mean_metrics:
                # Leaves are in the order of their names: this one is before the loss.
                kinds.insert(-1, seen.PLAIN)
                metrics = seen.over_workers(kinds, metrics, axis_name, share=share)
        if copies is not None:
            new = with_parts(new, param_copy=copies)
        new = lift_replicas(new) if replicas else new
        if field and not applied.takes(state, field):
            new = with_parts(new, **{field: next_field()})
        applied.refuse_differing(new, state, axis_name)
        metrics["skipped"] = skipped(opt_state).astype(jnp.float32)
        if (scale := loss_scale(opt_state)) is not None:
            metrics["loss_scale"] = scale
        if not mean_metrics:
            metrics = jax.tree.map(lambda x: _compat.varying(x, axis_name)[None], metrics)
        return new, metrics, _compat.varying(examples, axis_name)

    return local


class TrainStep:
    """Wraps a jitted step: says what is wrong with a state, and limits how many steps queue up; all else is as in the step.

    XLA's collectives between CPU devices of one process wait in threads of one pool. If many steps queue up, they take all
    threads, none can continue, and the process ends after 40 s. So on CPU a step waits for the one before the last: two are in
    flight, one runs while the next is prepared, and more would be no faster. On other platforms it does not wait.
    """

    def __init__(
        self, jitted: jax.stages.Wrapped, mesh: Mesh, *, donates: bool = False, pins: PinWatch | None = None
    ) -> None:
        """Wraps a function of a state and a batch that returns a state and metrics."""
        self._jitted, self._mesh = jitted, mesh
        # An abstract mesh has no devices: its program is lowered but not run.
        has_devices = not isinstance(mesh, AbstractMesh)
        self._waits = has_devices and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._last: Any = ()
        self._watch, self._pins = SkipWatch(), pins
        self._buffers = OwnBuffers() if donates else None

    def __call__(self, state: Any, *args: Any) -> Any:
        """Runs the step."""
        if self._buffers is None:
            refusals.refuse_donated(state)
        else:
            state = self._buffers.of(state, args)
        if self._pins is not None:
            self._pins(state)
        with calls.call_explained(self._mesh):
            new, metrics = self._jitted(state, *args)
        if not _compat.is_traced(metrics["loss"]):
            if self._buffers is not None:
                self._buffers.returned(new)
            self._watch(metrics["skipped"], metrics.get("loss_scale"))
            if self._waits:
                last, self._last = self._last, metrics["loss"]
                jax.block_until_ready(last)
        return new, metrics

    def __getattr__(self, name: str) -> Any:
        """Returns what the jitted function has: ``lower``, ``trace``, ``eval_shape``, ``clear_cache``."""
        return getattr(self._jitted, name)
