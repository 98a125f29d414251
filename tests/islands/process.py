"""One island as a process of its own: a small model around ``make_train_step``. Prints a JSON line for what happens."""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp_jax as gc
from benchmarks.world.ledger import Ledger

PARAMS = {
    "w1": jax.random.normal(jax.random.key(1), (16, 64)) / 4,
    "w2": jax.random.normal(jax.random.key(2), (64, 8)) / 8,
}
TRUE = jax.random.normal(jax.random.key(3), (16, 8))
CODE = gc.compressors.block_quantized(bits=4, block=64)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
OPTIONS = {
    "compressor": CODE,
    "momentum": 0.3,
    "every": 8,
    "grace": 0.5,
    "patience": 2.0,
    "poll": 0.05,
    "snapshot_every": 1000,
}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w1"]) @ params["w2"] - jnp.sin(batch @ TRUE / 4)) ** 2)


def say(kind, **facts):
    print(json.dumps({"kind": kind, **facts}), flush=True)


def main(place, name, folder, stop, options):
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.chain(gc.dense(axis_name="data"), optax.adam(3e-3))
    step = gc.make_train_step(loss, tx, mesh)
    state = gc.init_state(PARAMS, tx, mesh)
    rng = np.random.default_rng([ord(name[0]), time.time_ns() % 1000])
    codec = gc.islands.codec(CODE, PARAMS)
    ledger, weight = Ledger(folder, codec.size), WEIGHTS[name]
    moved, last = ledger.encoded.copy(), 0
    with gc.islands.join(
        place, PARAMS, name=name, folder=folder, weight=weight, store_options=options, **OPTIONS
    ) as island:
        state = state._replace(params=island.begin(state.params))
        say("begun", round=island.diagnostics()["island/round"], restored=ledger.restored)
        while not pathlib.Path(stop).exists():
            before = codec.flat(state.params).astype(np.float64)
            state, metrics = step(state, rng.normal(size=(32, 16)).astype(np.float32))
            moved = moved + weight * (before - codec.flat(state.params))
            state = state._replace(params=island.step(state.params))
            if island._exchanging.island._landed != last:
                last = island._exchanging.island._landed
                say("landed", round=last, loss=float(metrics["loss"]))
            time.sleep(0.01)
        island.close()
        say("end", **island.diagnostics())
    since = weight * (island._exchanging.base - codec.flat(state.params)).astype(np.float64)
    ledger.save(codec, moved, since, weight=weight)


if __name__ == "__main__":
    main(*sys.argv[1:5], json.loads(sys.argv[5]))
