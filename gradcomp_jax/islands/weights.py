"""Weights for those who only read them: deltas from one version to the next, and now and then a full copy.

Base and deltas are the trainer's weights, bit for bit: each has the digest of what comes out.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import PyTree
from gradcomp_jax.islands.deltas import Words, apply_delta, encode_delta, zstandard_library
from gradcomp_jax.islands.keys import WEIGHTS, digest
from gradcomp_jax.islands.log import IslandError
from gradcomp_jax.islands.objects import NotOursError, from_json, to_json
from gradcomp_jax.islands.store import Store, StoreError, open_store

_MAGIC = b"gcweight"
_KEY = re.compile(rf"{WEIGHTS}/([0-9]{{10}})-(full|delta)")


@dataclasses.dataclass(frozen=True)
class Published:
    """Says what a version cost.

    Attributes:
        number: of the version, from 1 on.
        changed: 16-bit words that are not what they were.
        delta_bytes: of the delta; 0 where there is none.
        full_bytes: of the full copy; 0 where there is none.
    """

    number: int
    changed: int
    delta_bytes: int
    full_bytes: int


def _spec(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and the dtype of an array, or of a description of one; NumPy's may be wider than JAX's."""
    return np.shape(leaf), np.dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


class _Weights:
    """Turns a tree into 16-bit words and back."""

    def __init__(self, params: PyTree) -> None:
        leaves, self.treedef = jax.tree.flatten(params)
        self.specs = [_spec(leaf) for leaf in leaves]
        self.sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.specs]
        self.size = sum(self.sizes)
        named = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        self.digest = digest(repr([(n, s, str(d)) for n, (s, d) in zip(named, self.specs, strict=True)]).encode())

    def words(self, params: PyTree) -> Words:
        """Returns the bits of a tree; a last byte alone has a zero beside it."""
        leaves = jax.tree.leaves(params)
        if [_spec(leaf) for leaf in leaves] != self.specs:
            raise ValueError("these weights have other shapes or dtypes than those that were published first")
        found, start = np.zeros(self.size + self.size % 2, np.uint8), 0
        for leaf, size in zip(leaves, self.sizes, strict=True):
            found[start : start + size] = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
            start += size
        return found.view("<u2").astype(np.uint16, copy=False)

    def tree(self, words: Words) -> PyTree:
        """Inverts :meth:`words`: arrays of the host, in their own dtypes."""
        bits, leaves, start = words.astype("<u2", copy=False).view(np.uint8), [], 0
        for (shape, dtype), size in zip(self.specs, self.sizes, strict=True):
            leaves.append(bits[start : start + size].copy().view(dtype).reshape(shape))
            start += size
        return jax.tree.unflatten(self.treedef, leaves)


def _object(head: Mapping[str, Any], body: bytes) -> bytes:
    text = to_json(dict(head))
    return _MAGIC + len(text).to_bytes(4, "little") + text + body


def _read_object(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[8:12], "little")
    if data[:8] != _MAGIC or length > len(data) - 12:
        raise NotOursError("these are no weights")
    head = from_json(data[12 : 12 + length], "head of weights")
    if set(head) != {"number", "tree", "before", "after", "mode", "count", "lengths"}:
        raise NotOursError("these are no weights of this version")
    return head, data[12 + length :]


def _key(number: int, kind: str) -> str:
    return f"{WEIGHTS}/{number:010d}-{kind}"


def _found(store: Store) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"full": [], "delta": []}
    for key in store.names(WEIGHTS):
        if match := _KEY.fullmatch(key):
            found[match[2]].append(int(match[1]))
    return {kind: sorted(numbers) for kind, numbers in found.items()}


class WeightWriter:
    """Publishes versions of weights to a store, beside a run of islands or by itself. Make one with :func:`publish_weights`."""

    def __init__(self, store: Store, params: PyTree, full_every: int) -> None:
        """Takes a store, a tree of the weights, and versions from one full copy to the next."""
        zstandard_library()
        self._store, self._weights, self._full_every = store, _Weights(params), full_every
        self._words: Words | None = None
        self._after, self._number = "", -1
        self._since_full = 0
        self._left: list[tuple[str, bytes]] = []
        self._wrote: dict[str, str] = {}

    def publish(self, params: PyTree) -> Published:
        """Writes the next version: a delta from the one before, and a full copy where one is due.

        Raises:
            StoreError: if the store is away. Call it again, with these weights or later ones.
            IslandError: if another process publishes here.
        """
        self._write()
        if self._number < 0:
            self._number = max([0, *(number for numbers in _found(self._store).values() for number in numbers)])
        new, number = self._weights.words(params), self._number + 1
        head: dict[str, Any] = {"number": number, "tree": self._weights.digest, "after": digest(new), "before": ""}
        changed, delta, full = 0, b"", b""
        if self._words is not None:
            facts, body = encode_delta(self._words, new)
            changed = facts["count"]
            delta = _object({**head, **facts, "before": self._after}, body)
            self._left.append((_key(number, "delta"), delta))
        self._since_full += 1
        if self._words is None or self._since_full >= self._full_every:
            facts, body = encode_delta(np.zeros_like(new), new)
            full = _object({**head, **facts}, body)
            # After the delta: who has the version before needs no full copy.
            self._left.append((_key(number, "full"), full))
            self._since_full = 0
        self._words, self._after, self._number = new, head["after"], number
        self._write()
        return Published(number, changed, len(delta), len(full))

    def _write(self) -> None:
        """Writes what is not in the store; what was written though its answer was lost is found there."""
        while self._left:
            key, data = self._left[0]
            if not self._store.create(key, data) and self._store.get(key) != data:
                raise IslandError(f"{key} is another process's: publish to another place")
            self._wrote[key] = digest(data)
            self._left.pop(0)
            if key.endswith("full"):
                self._clean()

    def _clean(self) -> None:
        """Deletes this process's versions before the last full copy but one, where they are what it wrote."""
        full = _found(self._store)["full"]
        if len(full) < 2:
            return
        for key in sorted(self._wrote):
            match = _KEY.fullmatch(key)
            if match and int(match[1]) < full[-2] + (match[2] == "delta"):
                data = self._store.get(key)
                if data is not None and digest(data) == self._wrote[key]:
                    self._store.delete(key)
                self._wrote.pop(key)


class WeightReader:
    """Reads versions of weights, and writes nothing. Make one with :func:`read_weights`."""

    def __init__(self, store: Store, params: PyTree) -> None:
        """Takes a store and a tree of arrays or shapes, in the weights' dtypes."""
        zstandard_library()
        self._store, self._weights = store, _Weights(params)
        self._words: Words | None = None
        self._after, self.number = "", 0
        self.read_bytes = 0

    def update(self) -> tuple[int, PyTree]:
        """Reads what is new, and returns the number of the newest version and its weights, arrays of the host.

        It reads deltas where it has the version before, and else the newest full copy. A damaged delta counts as missed.

        Raises:
            StoreError: if the store is away, or nothing was published yet; try again later.
            ValueError: for weights of another tree.
        """
        found = _found(self._store)
        if self._words is not None:
            self._follow(found["delta"])
        for number in reversed(found["full"]):
            if number <= self.number:
                break
            if self._take(number, "full"):
                self._follow(found["delta"])
                break
        if self._words is None:
            raise StoreError("no weights were published yet")
        return self.number, self._weights.tree(self._words)

    def _follow(self, deltas: list[int]) -> None:
        there = set(deltas)
        while self.number + 1 in there and self._take(self.number + 1, "delta"):
            pass

    def _take(self, number: int, kind: str) -> bool:
        """Takes a version; returns whether it is there, follows from the one before, and is whole."""
        data = self._store.get(_key(number, kind))
        if data is None:
            return False
        self.read_bytes += len(data)
        try:
            head, body = _read_object(data)
            if head["tree"] != self._weights.digest:
                raise ValueError("the weights that are published here have other names, shapes or dtypes than these")
            size = (self._weights.size + 1) // 2
            old = self._words if kind == "delta" else np.zeros(size, np.uint16)
            if old is None or (kind == "delta" and head["before"] != self._after) or head["number"] != number:
                return False
            new = apply_delta(old, head, body)
        except NotOursError:
            return False
        if digest(new) != head["after"]:
            return False
        self._words, self._after, self.number = new, head["after"], number
        return True


@_arguments.checked
def publish_weights(
    place: Any, params: PyTree, *, full_every: int = 50, store_options: Mapping[str, Any] | None = None
) -> WeightWriter:
    """Publishes weights to a folder or a bucket, for inference servers and whoever joins late: lossless, as deltas.

    Each version is a delta from the one before; every ``full_every`` versions there is a full copy too. Those before the last
    full copy but one are deleted, if this process wrote them.

    Example::

        writer = gc.islands.publish_weights("s3://bucket/weights", params)
        for step in range(1000):
            ...
            writer.publish(params)  # the weights as they are served, such as bfloat16

        reader = gc.islands.read_weights("s3://bucket/weights", params)
        number, params = reader.update()

    Args:
        place: as for :func:`join`; of a run of islands or another.
        params: a tree of arrays or shapes in the dtypes that are served.
        full_every: versions from one full copy to the next.
        store_options: as for :func:`join`.

    References:
        PULSE, 2026, https://arxiv.org/abs/2602.03839.
    """
    full_every = _checks.positive_int("full_every", full_every)
    return WeightWriter(open_store(place, **(store_options or {})), params, full_every)


@_arguments.checked
def read_weights(place: Any, params: PyTree, *, store_options: Mapping[str, Any] | None = None) -> WeightReader:
    """Reads weights that :func:`publish_weights` writes, bit for bit.

    Args:
        place: where they are published.
        params: a tree of arrays or shapes in the dtypes that are served.
        store_options: as for :func:`join`.
    """
    return WeightReader(open_store(place, **(store_options or {})), params)
