"""Payloads of any compressor on the host: a vector to bytes and back, without an axis."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax import _arguments
from gradcomp_jax._checks import typed_key
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import Array, PyTree
from gradcomp_jax.collectives import Workers
from gradcomp_jax.compressors import Compressor, RowInfo, nbytes
from gradcomp_jax.compressors.in_frequency import InFrequency
from gradcomp_jax.core.layout import Group, Layout, Segment, View
from gradcomp_jax.core.layout_rules import layout_rules
from gradcomp_jax.core.made_by import made_by
from gradcomp_jax.core.masks import Mask
from gradcomp_jax.core.outbound import Piece, agree
from gradcomp_jax.core.policies import Policy
from gradcomp_jax.core.step_keys import StepKeys
from gradcomp_jax.islands.keys import digest
from gradcomp_jax.islands.objects import NotOursError
from gradcomp_jax.islands.outer import Vector

_MAGIC = b"gccode\x00\x01"
HEADER_BYTES = len(_MAGIC) + 16 + 8
"""Bytes before a payload: a magic word with the version, the digest of the configuration, and the seed."""


class Codec:
    """Encodes a vector by a compressor, as :func:`gradcomp_jax.exchange` lays out the tree that the vector is of.

    Make one with :func:`codec`.

    Attributes:
        digest: of the compressor with all its options, and of the names and shapes of the tree's leaves.
        size: entries of the vector: those of the tree's leaves, end to end.
        payload_bytes: bytes of a payload, without its header.
        side_bytes: bytes of a payload that are side information, on which workers along an axis would agree first.
        same_bits: whether payloads decode to the same bits on all machines: each entry is one operation, or several that no
            compiler contracts. It is not so where entries are sums of products (rotations, cosines, low rank).
    """

    def __init__(self, layout: Layout, tree: PyTree, key: Any) -> None:
        """Takes what becomes of every leaf of a tree of shapes."""
        self._leaves, self._treedef = jax.tree.flatten(tree)
        self.size = sum(leaf.size for leaf in self._leaves)
        self._groups = [(group, segments) for group, segments in layout.groups if segments]
        self._key = typed_key("key", key)
        self.digest = _digest_of(self._groups, tree, self._key)
        seed = jax.ShapeDtypeStruct((), jnp.int32)
        self._spec = jax.eval_shape(self._encoded, self._shapes(), seed)[0]
        self.payload_bytes = nbytes(self._spec)
        self.side_bytes = nbytes([side for _, side in self._spec])
        self.same_bits = not any(_adds_products(group.compressor) for group, _ in self._groups)
        self._encode, self._decode = jax.jit(self._encoded), jax.jit(self._decoded)

    def flat(self, tree: PyTree) -> Vector:
        """Returns the vector of a tree: its leaves in float32, end to end."""
        self.check(tree)
        vector = np.empty(self.size, np.float32)
        for at, leaf in zip(self._places(), jax.tree.leaves(tree), strict=True):
            vector[at] = np.asarray(leaf).reshape(-1)
        return vector

    def check(self, tree: PyTree) -> None:
        """Refuses a tree of other shapes.

        Raises:
            ValueError: if it is one.
        """
        if [leaf.shape for leaf in jax.tree.leaves(tree)] != [leaf.shape for leaf in self._leaves]:
            raise ValueError("the leaves of this tree have other shapes than those that the codec was made for")

    def tree(self, vector: Vector) -> PyTree:
        """Inverts :meth:`flat`: float32 arrays of the host that share the vector's memory."""
        parts = [vector[at].reshape(leaf.shape) for at, leaf in zip(self._places(), self._leaves, strict=True)]
        return jax.tree.unflatten(self._treedef, parts)

    def encode(self, vector: Vector, seed: int = 0) -> bytes:
        """Returns a header of 32 bytes and the payload.

        Args:
            vector: float32 ``[size]``.
            seed: with the key, what codes draw from; another for every payload.

        Raises:
            ValueError: for an entry that is not finite, or too large for the code.
        """
        with jax.default_device(_host()):
            payload, finite = self._encode(self._arrays(vector), jnp.int32(seed & 0x7FFFFFFF))
        if not finite:
            raise ValueError("the vector has an entry that is not finite, or too large for this code")
        body = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(payload)]
        return b"".join([_MAGIC, bytes.fromhex(self.digest), seed.to_bytes(8, "little"), *body])

    def decode(self, data: bytes) -> Vector:
        """Returns the vector that bytes stand for: float32 ``[size]``.

        Raises:
            ValueError: for bytes of another code, another tree or another length, and for numbers that are not finite.
        """
        seed, body = data[24:HEADER_BYTES], data[HEADER_BYTES:]
        if data[:8] != _MAGIC or data[8:24].hex() != self.digest:
            raise NotOursError("these bytes are not of this code, of these shapes, or of this version")
        if len(body) != self.payload_bytes:
            raise NotOursError(f"a payload of {len(body)} bytes, and this code's have {self.payload_bytes}")
        arrays, start = [], 0
        for leaf in jax.tree.leaves(self._spec):
            arrays.append(np.frombuffer(body, leaf.dtype, leaf.size, start).reshape(leaf.shape))
            start += nbytes(leaf)
        payload = jax.tree.unflatten(jax.tree.structure(self._spec), arrays)
        with jax.default_device(_host()):
            parts = self._decode(payload, jnp.int32(int.from_bytes(seed, "little") & 0x7FFFFFFF))
        vector = np.empty(self.size, np.float32)
        for at, part in zip(self._places(), parts, strict=True):
            vector[at] = np.asarray(part).reshape(-1)
        if not np.isfinite(vector).all():
            raise NotOursError("a payload with numbers that are not finite")
        return vector

    def _places(self) -> list[slice]:
        ends = itertools.accumulate((leaf.size for leaf in self._leaves), initial=0)
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    def _shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in self._leaves]

    def _arrays(self, vector: Vector) -> list[Any]:
        if vector.shape != (self.size,) or vector.dtype != np.float32:
            raise ValueError(f"a vector is float32 [{self.size}], got {vector.dtype} {list(vector.shape)}")
        return jax.tree.leaves(self.tree(vector))

    # What is compiled.

    def _encoded(self, leaves: Sequence[Array], seed: Array) -> tuple[list[tuple[Any, Any]], Array]:
        """Returns for each segment its payload and its side information, and whether all entries are finite."""
        found, finite, keys = [], [jnp.array(True)], self._keys(seed)
        for group, segments in self._groups:
            code, rows = group.compressor, list[Array]()
            pieces = [Piece(j, s, (), code.init((s.size,)), RowInfo(group.counts(s))) for j, s in enumerate(segments)]
            for j, piece in enumerate(pieces):
                rows.append(group.join(piece.segment, group.sources(piece.segment, leaves)))
                encoded = group.encoded_rows(piece.segment, rows[j])
                statistic = code.statistic(encoded, piece.info, piece.code)
                pieces[j] = dataclasses.replace(piece, info=piece.info._replace(statistic=statistic))
            agree([(group, pieces)], keys, Workers.along(None))
            own = keys.of_leaves(keys.own, [s.leaves[0] for s in segments])
            for j, piece in enumerate(pieces):
                info = piece.info._replace(key=own[j], side=code.side_of(piece.agreed, 0))
                payload, _ = group.encode(piece.segment, rows[j], piece.code, info)
                finite.append(code.finite(payload, info.statistic))
                found.append((payload, () if self._draws(code) else piece.agreed))
        return found, jnp.stack(finite).all()

    def _decoded(self, payload: Sequence[tuple[Any, Any]], seed: Array) -> list[Array]:
        """Returns the leaves."""
        keys, parts, given = self._keys(seed), dict[int, Array](), iter(payload)
        for group, segments in self._groups:
            code = group.compressor
            pieces = [Piece(j, s, (), (), RowInfo()) for j, s in enumerate(segments)]
            if self._draws(code):
                agree([(group, pieces)], keys, Workers.along(None))
            for piece in pieces:
                one, side = next(given)
                info = RowInfo(side=code.side_of(piece.agreed if self._draws(code) else side, 0))
                rows = group.decode(piece.segment, one, info)
                parts |= group.split(piece.segment, rows, self._shapes())
        return [parts[i] if leaf.size else jnp.zeros(leaf.shape) for i, leaf in enumerate(self._leaves)]

    def _keys(self, seed: Array) -> StepKeys:
        return StepKeys.of(self._key, seed, jnp.int32(0), None)

    @staticmethod
    def _draws(code: Compressor) -> bool:
        """Returns whether the side information is drawn from the key, and not sent."""
        return code.side_information in ("seeds", "worker_seeds")


def _adds_products(code: Compressor) -> bool:
    return code.multiplies or code.row_shape is not None or isinstance(code, InFrequency)


def _host() -> jax.Device:
    """Returns a device of the CPU: payloads are encoded while the accelerator trains."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "payloads are encoded on the CPU, which JAX_PLATFORMS leaves out: add it, as in JAX_PLATFORMS=cuda,cpu"
        ) from error


def _digest_of(groups: Sequence[tuple[Group, list[Segment]]], tree: PyTree, key: Array) -> str:
    named = [(path_name(path), leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    said = [
        made_by("code", {"code": group.compressor, "view": group.view, "leaves": tuple(s.leaves for s in segments)})
        for group, segments in groups
    ]
    return digest(repr((named, said)).encode(), np.asarray(jax.random.key_data(key)))


@_arguments.checked
def codec(
    compressor: Compressor | Policy,
    params: PyTree,
    *,
    mask: Mask | None = None,
    view: View | None = None,
    dense_compressor: Compressor | None = None,
    key: Any = 0,
) -> Codec:
    """Makes a codec of a compressor for vectors of a tree, which needs neither a mesh nor an axis.

    The format is that of :func:`gradcomp_jax.exchange` with the same arguments: the same leaves are compressed, in the same
    rows, and the others are dense. What :meth:`Codec.decode` returns is what one worker's payload decodes to there.

    Codes with a common maximum or mean have this worker's own in their payloads, because there is nobody to agree with. Codes
    that draw positions or signs draw them from the key and the seed in the header.

    Example:
        >>> codec = gc.islands.codec(gc.compressors.block_quantized(bits=4), params)
        >>> data = codec.encode(codec.flat(params), seed=1)
        >>> len(data) == codec.payload_bytes + 32
        True

    Args:
        compressor: encodes the leaves of the mask; or a policy.
        params: a tree of arrays or shapes.
        mask: as for :func:`gradcomp_jax.exchange`.
        view: likewise.
        dense_compressor: likewise.
        key: seed or key of all randomness, the same for all who exchange.

    Raises:
        ValueError: for a policy that averages some leaves already.
        TypeError: for a leaf that is not a real floating-point array.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.float32), params)
    rules = layout_rules(compressor, mask=mask, view=view, dense_compressor=dense_compressor)
    # Checked with the leaves' own dtypes; a vector is float32.
    rules.layout(params)
    layout = rules.layout(shapes)
    if layout.averaged:
        raise ValueError(
            "a policy that leaves out averaged leaves is for gradients: between islands nothing is averaged yet"
        )
    return Codec(layout, shapes, key)
