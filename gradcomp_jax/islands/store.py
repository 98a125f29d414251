"""What islands need of an object store: five verbs, of which the first, put if absent, is atomic."""

import abc
import concurrent.futures
import contextlib
import dataclasses
import datetime
import os
import pathlib
import threading
from typing import Any

from gradcomp_jax._errors import SettingError

_AT_ONCE = 8
"""Objects that are read at the same time."""
EXTRA = "pip install 'gradcomp_jax[islands]'"


class StoreError(OSError):
    """Says that the store did not answer. What was asked for may have been done or not."""


@dataclasses.dataclass(frozen=True)
class Create:
    """Asks to put an object where there is none; the answer is whether it was put. One of many writers wins."""

    key: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class Put:
    """Asks to put an object, in the place of one that may be there."""

    key: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class Get:
    """Asks for an object; the answer is its bytes, or ``None`` where there is none."""

    key: str


@dataclasses.dataclass(frozen=True)
class GetAll:
    """Asks for several objects at once, which far from the store takes as long as one; the answer has one for each key."""

    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Names:
    """Asks for the keys below a folder; the answer is a dictionary of their sizes. An empty folder is the whole store."""

    folder: str


@dataclasses.dataclass(frozen=True)
class Delete:
    """Asks to delete an object, which may be gone already."""

    key: str


class Store(abc.ABC):
    """Keeps objects under keys such as ``round/0000000001``.

    Every method raises :class:`StoreError` where the store is away.
    """

    @abc.abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Puts an object where there is none, atomically; returns whether it did."""

    @abc.abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Puts an object, in the place of one that may be there. A reader sees the old one or the new one."""

    @abc.abstractmethod
    def get(self, key: str) -> bytes | None:
        """Returns an object; ``None`` if there is none."""

    @abc.abstractmethod
    def names(self, folder: str) -> dict[str, int]:
        """Returns the keys below a folder, with the sizes of their objects."""

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Deletes an object, if it is there."""

    def get_all(self, keys: tuple[str, ...]) -> list[bytes | None]:
        """Returns several objects, each as :meth:`get` does; a store that is far away asks for them at the same time."""
        return [self.get(key) for key in keys]

    def perform(self, request: Any) -> Any:
        """Returns the answer to a request."""
        match request:
            case Create(key, data):
                return self.create(key, data)
            case Put(key, data):
                return self.put(key, data)
            case Get(key):
                return self.get(key)
            case GetAll(keys):
                return self.get_all(keys)
            case Names(folder):
                return self.names(folder)
            case Delete(key):
                return self.delete(key)
        raise TypeError(f"a store answers no {type(request).__name__}")


class MemoryStore(Store):
    """Keeps objects in the memory of this process, for tests and for islands that are threads of one process."""

    def __init__(self) -> None:
        """Begins empty."""
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes) -> bool:
        """Puts an object where there is none."""
        with self._lock:
            absent = key not in self.objects
            self.objects.setdefault(key, data)
            return absent

    def put(self, key: str, data: bytes) -> None:
        """Puts an object."""
        with self._lock:
            self.objects[key] = data

    def get(self, key: str) -> bytes | None:
        """Returns an object."""
        return self.objects.get(key)

    def names(self, folder: str) -> dict[str, int]:
        """Returns the keys below a folder."""
        with self._lock:
            return {key: len(data) for key, data in self.objects.items() if not folder or key.startswith(folder + "/")}

    def delete(self, key: str) -> None:
        """Deletes an object."""
        with self._lock:
            self.objects.pop(key, None)


class ObjectStore(Store):
    """Keeps objects in a bucket or a folder, through obstore."""

    def __init__(self, store: Any) -> None:
        """Takes a store of obstore, such as ``obstore.store.S3Store(...)``."""
        self._obstore, self._store = _obstore(), store

    def create(self, key: str, data: bytes) -> bool:
        """Puts an object where there is none."""
        try:
            self._asked("put", key, data, mode="create")
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        """Puts an object."""
        self._asked("put", key, data)

    def get(self, key: str) -> bytes | None:
        """Returns an object."""
        try:
            return self._asked("get", key, then=lambda result: bytes(result.bytes()))
        except FileNotFoundError:
            return None

    def get_all(self, keys: tuple[str, ...]) -> list[bytes | None]:
        """Returns several objects, some at the same time."""
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self.get, keys))

    def names(self, folder: str) -> dict[str, int]:
        """Returns the keys below a folder."""
        found = self._asked("list", folder or None, then=lambda chunks: [one for chunk in chunks for one in chunk])
        return {one["path"]: one["size"] for one in found}

    def delete(self, key: str) -> None:
        """Deletes an object."""
        with contextlib.suppress(FileNotFoundError):
            self._asked("delete", key)

    def _asked(self, verb: str, *args: Any, then: Any = lambda answer: answer, **options: Any) -> Any:
        faults = self._obstore.exceptions
        try:
            return then(getattr(self._obstore, verb)(self._store, *args, **options))
        except (FileNotFoundError, faults.AlreadyExistsError):
            raise
        except (OSError, faults.BaseError) as error:
            raise StoreError(
                f"the store did not {verb} {args[0]}: {str(error).strip().partition(chr(10))[0]}"
            ) from error


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ImportError(f"islands reach a folder or a bucket through obstore: {EXTRA}") from error
    return obstore


def open_store(place: Any, *, make: bool = True, **options: Any) -> Store:
    """Returns the store of a place.

    Args:
        place: a folder, a URL such as ``s3://bucket/run``, a store of obstore, or a :class:`Store`.
        make: whether to make a folder that is not there.
        options: for a URL, what ``obstore.store.from_url`` takes, such as ``region=`` and ``client_options=``.

    Raises:
        StoreError: if a folder is not there, and is not to be made.
        SettingError: if the place can be no store.
    """
    if isinstance(place, Store):
        return place
    library = _obstore()
    if not isinstance(place, (str, pathlib.Path)):
        return ObjectStore(place)
    if not make and "://" not in str(place) and not os.path.exists(place):
        raise StoreError(f"there is no folder {place}")
    try:
        if "://" in str(place):
            # An island trains on and asks again by itself; it must not hang in one request.
            patience = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=20)}
            return ObjectStore(library.store.from_url(str(place), **{"retry_config": patience, **options}))
        if options:
            raise SettingError(f"{place} is a folder, which has no options, got {', '.join(options)}")
        return ObjectStore(library.store.LocalStore(pathlib.Path(place).absolute(), mkdir=True))
    except (OSError, library.exceptions.BaseError) as error:
        raise SettingError(f"cannot open {place} as a store: {error}") from error
