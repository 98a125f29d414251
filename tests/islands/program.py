"""One process of a JAX program that is an island, with a part of the parameters. Prints what ``process`` does."""

import pathlib
import sys
import time

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp_jax as gc
from gradcomp_jax import _everyone
from gradcomp_jax.islands.keys import digest


def main(place, name, folder, stop, address, index, count):
    index, folder = int(index), pathlib.Path(folder)
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), index)
    # It makes arrays, which must come after that.
    from benchmarks.world.ledger import Ledger
    from tests.islands.process import CODE, OPTIONS, PARAMS, WEIGHTS, loss, say

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = {"w1": NamedSharding(mesh, P("data")), "w2": NamedSharding(mesh, P())}

    def laid(value, sharding):
        return jax.make_array_from_callback(value.shape, sharding, lambda part: np.asarray(value)[part])

    def flat(params):
        return codec.flat(multihost_utils.process_allgather(params, tiled=True) if int(count) > 1 else params)

    def own(params):
        shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
        return [f"{shard.index}: {digest(np.asarray(shard.data))}" for shard in shards]

    tx = optax.adam(3e-3)

    @jax.jit
    def train(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), shardings), state

    params = jax.tree.map(laid, PARAMS, shardings)
    state, codec = jax.jit(tx.init)(params), gc.islands.codec(CODE, PARAMS)
    seed = _everyone.of_first(time.time_ns() % 1000)
    rng = np.random.default_rng([ord(name[0]), seed])
    weight = WEIGHTS[name]
    if index == 0:
        folder.mkdir(exist_ok=True)
        ledger = Ledger(folder, codec.size)
        moved = ledger.encoded.copy()
    else:
        moved = np.zeros(codec.size)
    last = 0
    with gc.islands.join(place, params, name=name, folder=folder, weight=weight, **OPTIONS) as island:
        params = island.begin(params)
        numbers = island.diagnostics()
        say("begun", round=numbers["island/round"], restored=index == 0 and ledger.restored, own=own(params))
        while not _everyone.of_first(pathlib.Path(stop).exists()):
            before = flat(params).astype(np.float64)
            params, state = train(params, state, laid(rng.normal(size=(32, 16)).astype(np.float32), shardings["w1"]))
            moved = moved + weight * (before - flat(params))
            params = island.step(params)
            assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
            if island.diagnostics()["island/round"] != last:
                last = island.diagnostics()["island/round"]
                say("landed", round=last, own=own(params))
            time.sleep(0.01)
        island.close()
        say("end", **island.diagnostics())
    there = flat(params)
    if index:
        return
    exchanging = island._exchanging
    now = exchanging.island.log.now
    say("centre", round=now.round, digest=now.digest)
    ledger.save(codec, moved, weight * (exchanging.base - there).astype(np.float64), weight=weight)


if __name__ == "__main__":
    main(*sys.argv[1:])
