"""The law of an island, from outside: what it encoded, through kills, against what the run accepted and what it still holds."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from gradcomp_jax.islands import Codec, Store, exchanging, history, keys
from gradcomp_jax.islands.account import Account, Record
from gradcomp_jax.islands.joining import drive
from gradcomp_jax.islands.log import Centre, Log
from gradcomp_jax.islands.objects import Payload

_SUMS, _LAW = "encoded.npz", "law.npz"


class Ledger:
    """Keeps what was encoded so far, with each record that was written: whichever is on the disk after a kill, its sum is too.

    Make it before the island joins. One process has one.

    Attributes:
        encoded: what departed, weighted, float64.
        restored: whether it goes on from a process before.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Takes the island's folder and the entries of a vector."""
        self._folder, self._sums, self._write = folder, dict[str, Any](), exchanging.write_whole
        if (folder / _SUMS).exists():
            with np.load(folder / _SUMS) as found:
                self._sums = dict(found)
        self.restored = bool(self._sums)
        record = folder / "island.record"
        self.encoded = self._sums[keys.digest(record.read_bytes())] if self.restored else np.zeros(size)
        depart = Account.depart

        def departing(account: Account, progress: Any, weight: float, *args: Any, **options: Any) -> Any:
            self.encoded = self.encoded + weight * progress.astype(np.float64)
            return depart(account, progress, weight, *args, **options)

        Account.depart = departing  # type: ignore[method-assign]
        exchanging.write_whole = self._writing

    def _writing(self, path: Any, content: bytes, **options: Any) -> None:
        self._sums = dict(list(self._sums.items())[-2:]) | {keys.digest(content): self.encoded}
        data = io.BytesIO()
        np.savez(data, **self._sums)
        self._write(self._folder / _SUMS, data.getvalue())
        self._write(path, content, **options)

    def save(self, codec: Codec, moved: Any, since: Any = 0.0, *, weight: float = 1.0) -> None:
        """Writes what an island that has ended saw and holds.

        Args:
            codec: the run's.
            moved: what its steps moved, weighted.
            since: the part of it that neither the run nor the island's record has, weighted.
            weight: of the island.
        """
        record = Record.from_bytes((self._folder / "island.record").read_bytes())
        flying = record.account(codec).flight
        np.savez(
            self._folder / _LAW,
            encoded=self.encoded,
            moved=moved,
            # What was handed over and not encoded is in the record.
            since=since + weight * (record.progress if record.progress.size else 0),
            kept=record.kept,
            sent=flying.sent if flying else np.zeros(codec.size),
            flying=np.array([str(flying.round), flying.digest] if flying else []),
        )


def replay(store: Store, codec: Codec) -> list[Centre]:
    """Returns the run's centres, made again from the store alone; each decision has the digest of the one before."""
    log = Log(None, codec)
    drive(store, log.begin())
    found = [log.now]
    for decision in history(store):
        assert decision.before == found[-1].digest, f"the decision of round {decision.round} follows another centre"
        log.apply(decision, [store.get(keys.payload_key(e.island, decision.round, e.digest)) for e in decision.entries])
        found.append(log.now)
    return found


def errors(store: Store, codec: Codec, name: str, folder: Path) -> tuple[float, float]:
    """Returns by how much the law of an island fails, as shares of its largest entry: rounding, where nothing is lost.

    The first is accepted + kept + in flight against what it encoded, the second encoded + since departure against what its
    steps moved.
    """
    with np.load(folder / _LAW) as found:
        law = dict(found)
    accepted, log = np.zeros(codec.size), history(store)
    for decision in log:
        for entry in decision.entries:
            if entry.island == name:
                data = store.get(keys.payload_key(name, decision.round, entry.digest))
                accepted += codec.decode(Payload.from_bytes(data or b"").body)
    if len(flying := law["flying"]):
        number = int(flying[0])
        if number <= len(log) and log[number - 1].accepts(name, str(flying[1])):
            law["sent"] = np.zeros(codec.size)
    scale = float(np.abs(law["moved"]).max())
    assert scale > 0
    held = accepted + law["kept"] + law["sent"]
    return (
        float(np.abs(held - law["encoded"]).max() / scale),
        float(np.abs(law["encoded"] + law["since"] - law["moved"]).max() / scale),
    )
