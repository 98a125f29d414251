"""Joining a run of islands, and following one."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from gradcomp_jax import _arguments, _checks
from gradcomp_jax._files import local_folder
from gradcomp_jax._typing import PyTree
from gradcomp_jax.compressors import Compressor
from gradcomp_jax.islands.exchanging import Exchanging
from gradcomp_jax.islands.host_codec import Codec, codec
from gradcomp_jax.islands.island import Island
from gradcomp_jax.islands.keys import check_island
from gradcomp_jax.islands.log import Log, Requests
from gradcomp_jax.islands.member import Member
from gradcomp_jax.islands.objects import Configuration
from gradcomp_jax.islands.processes import of_program
from gradcomp_jax.islands.store import Store, StoreError, open_store


class Follower:
    """Reads the centre of a run, for evaluation or serving, and writes nothing. Make one with :func:`follow`."""

    def __init__(self, open_place: Callable[[], Store], code: Codec) -> None:
        """Takes what opens the store, if it is there yet, and the run's code."""
        self._open, self._code, self._log = open_place, code, Log(None, code)
        self._store: Store | None = None
        with contextlib.suppress(StoreError):
            self._store = open_place()

    def update(self) -> tuple[int, PyTree]:
        """Reads what is new, and returns the number of the last decided round and the centre after it, float32.

        Raises:
            StoreError: if the store is away, or there is no run yet; try again later.
            IslandError: if the run has another code.
        """
        store = self._store = self._store or self._open()
        if self._log.centre is None and not drive(store, self._log.begin()):
            raise StoreError("there is no run yet")
        drive(store, self._log.follow())
        centre = self._log.now
        return centre.round, self._code.tree(centre.state.centre.copy())


def drive(store: Store, requests: Requests) -> Any:
    """Performs all requests, and returns what they come to."""
    answer: Any = None
    try:
        while True:
            request = requests.throw(answer) if isinstance(answer, StoreError) else requests.send(answer)
            try:
                answer = store.perform(request)
            except StoreError as error:
                answer = error
    except StopIteration as end:
        return end.value


@_arguments.checked
def join(
    place: Any,
    params: PyTree,
    *,
    name: str,
    folder: str | os.PathLike[str],
    compressor: Compressor | Codec,
    every: int = 100,
    weight: float = 1.0,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    decay: float = 1.0,
    quorum: int = 1,
    grace: float = 10.0,
    patience: float = 60.0,
    snapshot_every: int = 10,
    norm_limit: float = 10.0,
    poll: float = 1.0,
    found: bool = True,
    store_options: Mapping[str, Any] | None = None,
) -> Member:
    r"""Joins a run of islands, or founds it: programs that train alone and exchange outer gradients over an object store.

    After ``every`` steps an island writes :math:`w\,(b - x)` plus what it has kept, encoded, where b is where it departed last.
    A round accepts the payloads that are there once it has a quorum, and either all living islands or the grace window is over.
    All islands take the same outer step, bit for bit. What a round does not accept goes out with a later one.

    All processes of a JAX program are one island: each of them joins, with the same arguments, after
    ``jax.distributed.initialize``. Process 0 talks to the store, and has the folder.

    Args:
        place: a folder, a URL such as ``s3://bucket/run``, a store of obstore, or a :class:`~gradcomp_jax.islands.Store`.
        params: the parameters; those of whoever founds the run are its first centre. They may have parts in all processes.
        name: this island's name, which no other has.
        folder: a folder on this machine's disk for what the island keeps; a process that goes on after a crash needs it. Of
            several processes it is process 0's, and the others make none.
        compressor: encodes payloads: one of :mod:`gradcomp_jax.compressors`, or a :func:`codec` with a mask or a policy.
        every: steps from one payload to the next.
        weight: what this island counts for in a round, such as its batch size over that of the others, in 1/1024 to 1024.
        learning_rate: of the outer step. This and what follows, up to ``norm_limit``, is the same for all islands of a run.
        momentum: of the outer step.
        nesterov: whether the outer momentum is Nesterov's.
        decay: of what an island keeps; below 1 it forgets on purpose. It is this island's own.
        quorum: payloads that a round needs.
        grace: seconds that a round waits for living islands once it has a quorum; up to 8 times as long for one that missed the
            rounds before.
        patience: seconds without a heartbeat after which an island is not waited for.
        snapshot_every: rounds from one snapshot of the centre to the next.
        norm_limit: how many times the median of the others' a payload's norm may be.
        poll: seconds between two looks at the store.
        found: whether to found the run where there is none; otherwise waits for it.
        store_options: for a URL, what ``obstore.store.from_url`` takes.

    Returns:
        A :class:`Member`, for ``with``.

    Raises:
        ValueError: for a number out of its range, a code that decodes to other bits on other machines, and processes that were
            given different arguments.
        ImportError: without the extra ``islands``.

    References:
        Douillard et al., 2023, DiLoCo, https://arxiv.org/abs/2311.08105; 2026, Decoupled DiLoCo,
        https://arxiv.org/abs/2604.21428.
    """
    every, quorum = _checks.positive_int("every", every), _checks.positive_int("quorum", quorum)
    snapshot_every = _checks.positive_int("snapshot_every", snapshot_every)
    _checks.below_one("momentum", momentum)
    _checks.above("norm_limit", norm_limit, 1)
    for label, value in (("learning_rate", learning_rate), ("patience", patience), ("poll", poll), ("weight", weight)):
        _checks.above(label, value, 0)
    _checks.at_least_zero("grace", grace)
    _checks.at_least_zero("decay", decay)
    code = _code(compressor, params)
    if not code.same_bits:
        raise ValueError(
            "payloads of this compressor decode to sums of products, whose last bit differs by machine, and all islands must"
            " have the same centre: use block_quantized, topk, sign, ternary or dense"
        )
    configuration = Configuration(
        code.size,
        code.digest,
        learning_rate=float(learning_rate),
        momentum=float(momentum),
        nesterov=nesterov,
        quorum=quorum,
        grace=float(grace),
        patience=float(patience),
        snapshot_every=snapshot_every,
        norm_limit=float(norm_limit),
    )
    least, most = configuration.weights
    if not least <= weight <= most:
        raise ValueError(f"weight must be within {least} and {most}, got {weight}")
    check_island(name)
    processes = of_program()
    processes.check_equal({"name": name, "every": every, "weight": weight, "found": found} | configuration.to_dict())
    initial = processes.gathered(code, params) if found else None

    def beside() -> tuple[None, Exchanging]:
        make = functools.partial(
            Island,
            name,
            configuration,
            code,
            clock=time.monotonic,
            initial=initial,
            decay=float(decay),
            poll=float(poll),
        )
        store = open_store(place, **(store_options or {}))
        return None, Exchanging(lambda record: make(record=record), code, store, local_folder(folder), float(weight))

    return Member(processes, processes.decide(beside)[1], code, every)


@_arguments.checked
def follow(
    place: Any, params: PyTree, *, compressor: Compressor | Codec, store_options: Mapping[str, Any] | None = None
) -> Follower:
    """Follows a run of islands without taking part, for evaluation or serving: it reads, and writes nothing.

    Args:
        place: as for :func:`join`; a folder that is not there is not made.
        params: a tree of arrays or shapes, such as the run's parameters.
        compressor: the run's.
        store_options: as for :func:`join`.

    Returns:
        A :class:`Follower`.
    """
    return Follower(
        functools.partial(open_store, place, make=False, **(store_options or {})), _code(compressor, params)
    )


def _code(compressor: Compressor | Codec, params: PyTree) -> Codec:
    return compressor if isinstance(compressor, Codec) else codec(compressor, params)
