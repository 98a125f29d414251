"""Snapshots of the centre, and what is deleted: only what this island wrote itself, and finds as it wrote it."""

from collections.abc import Callable

from gradcomp_jax.islands import keys
from gradcomp_jax.islands.keys import digest
from gradcomp_jax.islands.log import Centre, Log, Requests
from gradcomp_jax.islands.store import Create, Delete, Get, Names


class Keeping:
    """Writes snapshots, and deletes what two later ones have made superfluous.

    Attributes:
        wrote: keys of the objects in the store that this island wrote and has not deleted, with their digests.
    """

    def __init__(self, log: Log, island: str, wrote: dict[str, str], keep: Callable[[], Requests]) -> None:
        """Takes the log, whose objects these are, what it wrote before, and what writes the island's record."""
        self.log, self.island, self.wrote, self._keep = log, island, wrote, keep
        self._cleaned = -1

    def poll(self) -> Requests:
        """Writes a snapshot, if it is this island's turn or the one whose turn it was has not; cleans up after one."""
        log, every = self.log, self.log.configuration.snapshot_every
        if log.due is not None:
            centre, decision = log.due
            turn = decision.entries[centre.round // every % len(decision.entries)].island
            if turn == self.island or log.now.round > centre.round:
                yield from self._write(centre)
                log.due = None
        now = log.now
        if now.round // every != self._cleaned:
            yield from self.clean()
            self._cleaned = now.round // every

    def _write(self, centre: Centre) -> Requests:
        key = keys.centre_key(centre.round, centre.digest)
        if key in (yield Names(keys.CENTRES)):
            return
        self.wrote[key] = centre.digest
        yield from self._keep()
        if not (yield Create(key, centre.state.to_bytes())):
            self.wrote.pop(key)

    def clean(self) -> Requests:
        """Deletes this island's payloads of rounds that two snapshots have passed, and its snapshots that two have."""
        snapshots = yield from self.log.checked()
        if len(snapshots) < 2:
            return
        passed = snapshots[1].round
        for key in sorted(self.wrote):
            payload, centre = keys.read_payload_key(key), keys.read_centre_key(key)
            if (payload and payload.round <= passed) or (centre and centre.round < passed):
                yield from self.delete(key)

    def delete(self, key: str) -> Requests:
        """Deletes an object that this island wrote; one with another content is somebody else's and stays."""
        data = yield Get(key)
        if data is not None and digest(data) == self.wrote.get(key):
            yield Delete(key)
        self.wrote.pop(key, None)
