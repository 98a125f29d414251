"""Gathers whole parameters from their shards, in few bits: the all-gather of FSDP."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp_jax import _arguments, _compat, _specs, kernels
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import Array, AxisName, PyTree
from gradcomp_jax.collectives import fused
from gradcomp_jax.compressors import Compressor, RowInfo, dense
from gradcomp_jax.core.masks import Mask, by_leaf, gains
from gradcomp_jax.core.refusals import refuse_beyond_float32
from gradcomp_jax.core.shards import Shards


@_arguments.checked
def gather_params(
    shards: PyTree,
    param_specs: PyTree,
    *,
    axis_name: AxisName,
    compressor: Compressor,
    base: PyTree | None = None,
    gradient: Compressor | None = None,
    mask: Mask | None = None,
    key: Any = None,
) -> PyTree:
    r"""Gathers parameters that lie along the axis, compressed: whole tensors, the same bits on every worker.

    Worker j encodes its shard :math:`w_j`, the payloads of all leaves cross in one all-gather, and every worker decodes
    :math:`\hat w = (D(C(w_1)), \dots, D(C(w_N)))`. The shards do not change, and the optimizer updates them::

        whole = gc.gather_params(shards, specs, axis_name="data", compressor=gc.compressors.block_quantized(bits=4))
        value, gradient = gc.local_value_and_grad(loss, axis_name="data")(whole, batch)
        updates, state = tx.update(gradient, state, shards)  # its exchange has collective=ReduceScatter(specs)
        shards = optax.apply_updates(shards, updates)

    The gradient is taken at :math:`\hat w` and applied to :math:`w`: it passes straight through the rounding.

    **Differences.** With ``base``, a whole copy that all workers have, :math:`\hat w = b + D(C(w - b))`, and
    :math:`\hat w` is the ``base`` of the next step. Error feedback needs no other state: :math:`w - \hat w` is what has not
    been sent yet, including the rounding error of the dtype of ``base``. The first base may be the initial parameters.

    **Inside the loss.** With ``gradient`` the function can be called in a function that is differentiated, for one layer at a
    time, in ``jax.checkpoint`` or not. Its gradient is that of a dense all-gather, the sum of the workers' gradients; divided
    by N it is their mean. ``gradient`` encodes what goes to the owners, in one all-to-all, and they add it up in float32. No
    error is kept.

    A NaN or an infinity in a shard reaches all workers: as NaN in every entry that shares its scale, or only in its own place
    if there is no scale. With ``base``, entries of the base that are not finite count as zeros, so that the copy is finite
    again once the shard is.

    Example:
        >>> def whole(shard):
        ...     code = gc.compressors.block_quantized(bits=8)
        ...     return gc.gather_params(shard, jax.P("data"), axis_name="data", compressor=code)
        >>> shards = jnp.ones((8, 32, 256))  # of a tensor of 256 x 256
        >>> jax.eval_shape(jax.vmap(whole, axis_name="data"), shards).shape  # whole on each of 8 workers
        (8, 256, 256)

    Args:
        shards: this worker's parameters, inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``; leaves that do not lie along
            the axis are returned unchanged.
        param_specs: the parameters' ``jax.sharding.PartitionSpec``, a tree or a prefix of it.
        axis_name: the axis to gather over.
        compressor: encodes shards. It must need no side information; a sparsifier needs a ``base``.
        base: whole parameters, equal on every worker; the result is in their dtypes, and otherwise in those of the shards.
        gradient: encodes gradients, if this is called in a function that is differentiated;
            ``gc.compressors.dense()`` sends float32. The result then counts as differing by worker, as gradients do.
        mask: which leaves to compress, as for :func:`gradcomp_jax.exchange`, judged by their shards' shapes. By default those
            of two or more dimensions that get smaller. The others are gathered uncompressed.
        key: a seed (int) or a typed key, a new one in each step, for compressors that round at random.

    Raises:
        ValueError: for a compressor that does not work here, a base of other shapes, or a random compressor without ``key``; if
            differentiated without ``gradient``.
        TypeError: for a leaf that is compressed, or differentiated, and is wider than float32.
        NameError: outside of the axis.

    References:
        Wang et al., 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.1 (qwZ: blocks of int8); Jia et al., 2024,
        SDP4Bit, https://arxiv.org/abs/2410.15526 (qWD: differences in 4 bits).
    """
    workers = _compat.axis_size(axis_name)
    if workers is None:
        raise NameError(
            f"the axis {axis_name!r} is not bound here: gather parameters inside jax.shard_map, jax.pmap or"
            f" jax.vmap(axis_name={axis_name!r})"
        )
    for code in (compressor, gradient or dense()):
        _check(code, key)
    if compressor.is_sparsifier and base is None:
        raise ValueError(
            f"{type(compressor).__name__} sends some entries, and the other parameters would be zeros: give base=, for"
            " differences of parameters"
        )
    (named, treedef), specs = jax.tree_util.tree_flatten_with_path(shards), _specs.by_leaf(param_specs, shards)
    leaves = [leaf for _, leaf in named]
    dims = [_specs.sharded_dim(spec, axis_name) for spec in specs]
    along = [i for i, dim in enumerate(dims) if dim is not None]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), shards)
    masked = by_leaf(gains(compressor, dense()) if mask is None else mask, shapes)
    wanted = [masked[i] and _has_gradient(leaves[i]) for i in along]
    bases: list[Any] = [None] * len(along)
    if base is not None:
        every = _by_leaf(base, shards)
        bases = [every[i] for i in along]
        for i in along:
            _check_base(path_name(named[i][0]), leaves[i].shape, dims[i], workers, jnp.shape(every[i]))
    rules = _Rules([dims[i] for i in along], wanted, axis_name, workers, compressor, gradient)
    cast = {path_name(named[i][0]): leaves[i] for i, own in zip(along, wanted, strict=True) if own or gradient}
    refuse_beyond_float32(cast)
    if isinstance(key, int):
        key = jax.random.key(key)
    for i, whole in zip(along, rules.gather([leaves[i] for i in along], bases, key), strict=True):
        leaves[i] = whole
    return jax.tree.unflatten(treedef, leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rules:
    """Says how the leaves along the axis are divided and encoded, and how their gradients are."""

    dims: Sequence[Any]
    wanted: Sequence[bool]
    axis_name: AxisName
    workers: int
    compressor: Compressor
    gradient: Compressor | None

    def gather(self, leaves: list[Array], bases: list[Any], key: Any) -> list[Array]:
        """Returns the whole tensors, with a gradient that passes straight through."""
        like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        gathered = jax.custom_vjp(self._gathered)
        gathered.defvjp(
            lambda leaves, bases, key: (self._gathered(leaves, bases, key), key),
            functools.partial(self._backward, like),
        )
        return gathered(leaves, bases, key)

    def _gathered(self, leaves: list[Array], bases: list[Any], key: Any) -> list[Array]:
        payloads: list[Any] = []
        for i, (leaf, dim, whole) in enumerate(zip(leaves, self.dims, bases, strict=True)):
            if self.wanted[i] and whole is not None:
                start = _compat.axis_index(self.axis_name) * leaf.shape[dim]
                own = lax.dynamic_slice_in_dim(_finite(whole), start, leaf.shape[dim], axis=dim)
                leaf = leaf.astype(jnp.float32) - own
            payloads.append(self._encode(self.compressor, leaf[None], i, key) if self.wanted[i] else leaf)
        flat, treedef = jax.tree.flatten(payloads)
        came = jax.tree.unflatten(treedef, fused.all_gather(flat, self.axis_name))
        result = []
        for i, (leaf, dim, whole) in enumerate(zip(leaves, self.dims, bases, strict=True)):
            stacked, dtype = came[i], leaf.dtype if whole is None else whole.dtype
            if self.wanted[i]:
                # Each row is decoded separately, so all workers' rows can be decoded at once.
                every = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), stacked)
                rows = self.compressor.decode(every).reshape(self.workers, -1)
                stacked = lax.slice_in_dim(rows, 0, leaf.size, axis=1).reshape(self.workers, *leaf.shape)
            shape = (*leaf.shape[:dim], leaf.shape[dim] * self.workers, *leaf.shape[dim + 1 :])
            value = jnp.moveaxis(stacked, 0, dim).reshape(shape)
            if self.wanted[i] and whole is not None:
                value = _finite(whole) + value
            result.append(kernels.narrowed(value, dtype))
        return result if self.gradient is None else _compat.varying(result, self.axis_name)

    def _backward(self, like: list[Any], key: Any, gradients: list[Array]) -> tuple[list[Any], None, None]:
        if self.gradient is None:
            raise ValueError(
                "gather_params is differentiated: gather outside of the loss, and take the gradient with respect to the whole"
                " parameters; or give gradient=, the compressor of what goes back to the owners"
            )
        result: list[Any] = [None] * len(like)  # zeros, to JAX
        floats = [i for i, leaf in enumerate(like) if _has_gradient(leaf)]
        codes = {i: self.gradient if self.wanted[i] else dense() for i in floats}
        shards = {i: Shards(self.workers, self.dims[i]) for i in floats}
        payloads = [self._encode(codes[i], shards[i].flat(gradients[i]), len(like) + i, key) for i in floats]
        flat, treedef = jax.tree.flatten(payloads)
        came = jax.tree.unflatten(treedef, fused.all_to_all(flat, self.axis_name))
        for i, payload in zip(floats, came, strict=True):
            own = kernels.from_rows(codes[i].reduce(payload), (like[i].size,), like[i].dtype)
            result[i] = shards[i].unflat(own, gradients[i].shape)
        return result, None, None

    def _encode(self, code: Compressor, parts: Array, number: int, key: Any) -> Any:
        """Encodes each part of a leaf, in separate rows; the payload has leaves ``[parts, rows, ...]``."""
        count, block = parts.shape[0], code.block
        flat = parts.reshape(count, -1).astype(jnp.float32)
        size = flat.shape[1]
        rows = jnp.pad(flat, ((0, 0), (0, -size % block))).reshape(-1, block)
        own = None
        if key is not None:
            own = jax.random.fold_in(jax.random.fold_in(key, _compat.axis_index(self.axis_name)), number)
        info = RowInfo(jnp.tile(kernels.valid_counts(size, block), count), own)
        info = info._replace(statistic=code.statistic(rows, info))
        payload, _ = code.encode(rows, (), info)
        return jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), payload)


def _has_gradient(leaf: Any) -> bool:
    return leaf.size > 0 and jnp.issubdtype(leaf.dtype, jnp.floating)


def _finite(whole: Array) -> Array:
    whole = whole.astype(jnp.float32)
    return jnp.where(jnp.isfinite(whole), whole, 0.0)


def _check(code: Compressor, key: Any) -> None:
    if code.side_information is not None:
        raise ValueError(
            f"gather_params sends payloads alone, and {type(code).__name__} has side information"
            f" ({code.side_information!r}); use gradcomp_jax.compressors.block_quantized, for instance"
        )
    if not any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(code.payload_spec(1))):
        raise ValueError(
            f"{type(code).__name__} sends integers alone, in which a NaN would not be seen; use a compressor with scales"
        )
    if code.unbiased and not code.lossless and key is None:
        raise ValueError(
            f"{type(code).__name__} rounds at random: give key=, another in each step, or a compressor that rounds to the"
            " nearest value"
        )


def _by_leaf(base: PyTree, shards: PyTree) -> list[Any]:
    """Returns what a base has for each leaf of the shards; anything for leaves that are whole already."""
    found: list[Any] = []
    try:
        jax.tree.map(lambda _, part: found.append(part), shards, base)
    except (ValueError, TypeError) as error:
        raise ValueError(f"base must be whole parameters, in a tree such as that of the shards: {error}") from error
    return found


def _check_base(path: str, shard: tuple[int, ...], dim: Any, workers: int, whole: tuple[int, ...]) -> None:
    if whole != (*shard[:dim], shard[dim] * workers, *shard[dim + 1 :]):
        raise ValueError(
            f"base has {path!r} of shape {whole}, and its {workers} shards are {shard} each: give whole parameters, such as"
            " an earlier result of gather_params"
        )


def whole_params(
    state: Any, param_specs: PyTree | None, names: tuple[Any, ...], compressor: Compressor | None
) -> tuple[PyTree, PyTree | None]:
    """Returns the parameters, those of which a device has a shard gathered, and new copies if there are any."""
    params, copies = state.params, getattr(state, "param_copy", None)
    if compressor is not None:
        for name in names:
            params = gather_params(params, param_specs, axis_name=name, compressor=compressor, base=copies)
        if copies is not None:
            copies = jax.tree.map(lambda p, copy: copy if isinstance(copy, tuple) else p, params, copies)
        return jax.tree.map(lambda whole, own: whole.astype(own.dtype), params, state.params), copies
    if copies is not None:
        raise ValueError(
            "the state has a param_copy, and parameters are not gathered as differences: give param_compressor"
        )
    leaves, treedef = jax.tree.flatten(params)
    for i, spec in enumerate(_specs.by_leaf(param_specs, params)):
        for name in names:
            dim = _specs.sharded_dim(spec, name)
            if dim is not None:
                leaves[i] = lax.all_gather(leaves[i], name, axis=dim, tiled=True)
    return jax.tree.unflatten(treedef, leaves), None
