"""One island that trains the character model: ``python -m benchmarks.world.island SETTINGS``, :class:`Settings` as JSON.

It prints a line of JSON for each thing that happens. After a kill it goes on from its folder, with the optimizer and the step
that it saved at its last departure.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one island does.

    Attributes:
        name: its name.
        worker: whose batches it trains on, 0 to 7.
        folder: its own.
        steps: inner steps, of which the learning rate's schedule knows.
        pace: least seconds of a step: what an accelerator would take, so that the cores are no limit.
        seed: of the parameters and the batches.
        rate: peak of the learning rate.
        place: the store; none to train alone.
        options: of the store.
        every: inner steps from one payload to the next.
        outer: learning rate and momentum of the outer step.
        grace: seconds.
        patience: seconds.
        poll: seconds.
        first: the step to begin with, of a late island.
        start: the ``time.monotonic()`` before which it does not begin, so that islands begin together.
        text: the data set's name.
    """

    name: str
    worker: int
    folder: str
    steps: int
    pace: float
    seed: int = 0
    rate: float = 4e-3
    place: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    every: int = 30
    outer: tuple[float, float] = (1.0, 0.5)
    grace: float = 10.0
    patience: float = 60.0
    poll: float = 0.25
    first: int = 0
    start: float = 0.0
    text: str = "enwik8"


def say(kind: str, **facts: Any) -> None:
    print(json.dumps({"kind": kind, "at": time.monotonic(), **facts}), flush=True)


def main(settings: Settings) -> None:
    import jax
    import numpy as np
    import optax

    import gradcomp_jax as gc
    from benchmarks.adamw.task import MODELS, Task, batch_of, parts, vocabulary
    from benchmarks.adamw.train import schedule
    from benchmarks.world.ledger import Ledger

    folder = pathlib.Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    task = Task("65k", 1, text=settings.text)
    model = MODELS[task.model]
    params = model.init(jax.random.key(settings.seed), vocabulary(task.text))
    text, key = jax.numpy.asarray(parts(task.text)["train"]), jax.random.key(1000 + settings.seed)
    tx = optax.adamw(schedule(settings.rate, settings.steps))

    @jax.jit
    def step(params: Any, state: Any, number: Any) -> Any:
        tokens = batch_of(task, text, key, number)[settings.worker]
        loss, gradients = jax.value_and_grad(model.loss)(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, number = tx.init(params), settings.first
    # The schedule of a late island is that of the others.
    state = jax.tree.map(lambda a: a + settings.first if a.shape == () else a, state)
    saved = folder / "optimizer.npz"
    if saved.exists():
        with np.load(saved) as at:
            number, leaves = int(at["step"]), [at[f"arr_{i}"] for i in range(len(jax.tree.leaves(state)))]
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
    jax.block_until_ready(step(params, state, number))
    code = compressor()
    codec = gc.islands.codec(code, params)
    ledger = Ledger(folder, codec.size) if settings.place else None
    island = None
    if settings.place:
        island = gc.islands.join(
            settings.place,
            params,
            name=settings.name,
            folder=folder,
            compressor=codec,
            every=settings.every,
            learning_rate=settings.outer[0],
            momentum=settings.outer[1],
            grace=settings.grace,
            patience=settings.patience,
            poll=settings.poll,
            snapshot_every=1_000_000,
            store_options=settings.options,
        )
        island.__enter__()
        params = island.begin(params)
    say("begun", step=number, restored=bool(ledger and ledger.restored))
    moved = ledger.encoded.copy() if ledger else None
    losses, last = list[float](), 0
    due = max(settings.start, time.monotonic())
    time.sleep(max(0.0, settings.start - time.monotonic()))
    while number < settings.steps:
        before = codec.flat(params).astype(np.float64) if ledger else None
        params, state, loss = jax.block_until_ready(step(params, state, number))
        number += 1
        losses.append(float(loss))
        if ledger:
            moved = moved + (before - codec.flat(params))
        if island:
            base, since = island._exchanging.base, island._steps + 1
            params = island.step(params)
            if island._exchanging.base is not base:
                # It departed or landed: a kill from now on loses no more than what follows.
                draft = folder / "draft.npz"
                np.savez(draft, *jax.tree.leaves(state), step=number)
                draft.replace(saved)
            if (landed := int(island._exchanging.island._landed)) != last:
                last, latest = landed, island._exchanging.island._latest
                of = latest.digest if latest.round == landed else None
                mean = float(np.mean(losses[-settings.every :]))
                kept = island.diagnostics()["island/kept_norm"]
                say("landed", round=last, step=number, since=since, digest=of, loss=mean, kept=kept)
        if number % 20 == 0:
            say("step", step=number, loss=float(np.mean(losses[-20:])))
        due += settings.pace
        # What is behind is not made up for: an accelerator would not be faster after a pause.
        due = max(due, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
    say("trained", step=number, loss=float(np.mean(losses[-200:])))
    if island:
        sent = island.close(params)
        say("end", step=number, sent=sent, **island.diagnostics())
        if ledger:
            ledger.save(codec, moved)


def compressor() -> Any:
    """Returns the code of all islands: four bits an entry."""
    import gradcomp_jax as gc

    return gc.compressors.block_quantized(bits=4)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    main(Settings(**json.loads(sys.argv[1])))
