"""What the host of an island can do in a second, on one thread: deltas of weights, the outer step, payloads.

    python benchmarks/islands.py --entries 2^25
    python benchmarks/islands.py --training

Weights are normal numbers of a deviation of .02 in bfloat16, and a step moves each by the learning rate, up or down, as Adam's
first steps do. Seconds are the process's own, medians of the rounds, so that other processes do not count; those of payloads
are the wall's, because XLA's CPU backend has threads.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

if "--training" in sys.argv:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp_jax as gc
from gradcomp_jax import _markdown
from gradcomp_jax.experiments.language_models import Decoder
from gradcomp_jax.islands.deltas import apply_delta, encode_delta
from gradcomp_jax.islands.keys import digest
from gradcomp_jax.islands.outer import OuterStep


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", default="2^25", help="parameters (default: %(default)s)")
    parser.add_argument(
        "--training", action="store_true", help="only how much the exchange slows the steps of a training"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    return parser.parse_args()


def seconds(rounds: int, run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    run()
    found = []
    for _ in range(rounds):
        start = clock()
        run()
        found.append(clock() - start)
    return statistics.median(found)


def deltas(entries: int, rounds: int) -> list[list[str]]:
    rng, rows = np.random.default_rng(0), []
    master = np.float32(0.02) * rng.standard_normal(entries, np.float32)
    old = master.astype(jnp.bfloat16).view(np.uint16)
    signs = rng.choice(np.array([-1, 1], np.float32), entries)
    for rate in (1e-6, 1e-5, 1e-4):
        new = (master - np.float32(rate) * signs).astype(jnp.bfloat16).view(np.uint16)
        head, body = encode_delta(old, new)
        assert np.array_equal(apply_delta(old, head, body), new)
        encode = seconds(rounds, lambda new=new: (encode_delta(old, new), digest(new)))
        decode = seconds(rounds, lambda head=head, body=body: digest(apply_delta(old, head, body)))
        rows.append(
            [
                f"{rate:g}",
                f"{head['count'] / entries:.1%}",
                f"{2 * entries / len(body):.1f}",
                f"{2 * entries / encode / 1e6:.0f}",
                f"{2 * entries / decode / 1e6:.0f}",
            ]
        )
    return rows


def payloads(entries: int, rounds: int) -> list[list[str]]:
    params = {"w": jax.ShapeDtypeStruct((entries // 1024, 1024), jnp.float32)}
    x, rows = np.random.default_rng(0).standard_normal(entries // 1024 * 1024, np.float32), []
    for name, code in {
        "block_quantized(bits=4)": gc.compressors.block_quantized(bits=4),
        "topk(1/64, block=4096, bits=2)": gc.compressors.topk(1 / 64, block=4096, bits=2, pack_positions=True),
    }.items():
        codec = gc.islands.codec(code, params)
        data = codec.encode(x)
        encode = seconds(rounds, lambda codec=codec: codec.encode(x), time.perf_counter)
        decode = seconds(rounds, lambda codec=codec, data=data: codec.decode(data), time.perf_counter)
        rows.append(
            [f"`{name}`", f"{4 * x.size / len(data):.1f}", *(f"{x.size / s / 1e6:.0f}" for s in (encode, decode))]
        )
    return rows


def training(rounds: int, every: int = 100) -> tuple[float, list[float]]:
    """Returns seconds of a step alone, and how many times as long steps take with the exchange beside them, by round.

    A decoder of 814 thousand parameters, alone in its run; XLA has one thread, and the exchange has what is left.
    """
    model = Decoder(width=128, layers=4, heads=4, length=128)
    params, tx = model.init(jax.random.key(0), 128), optax.adamw(1e-3)
    tokens = jax.random.randint(jax.random.key(1), (8, model.length + 1), 0, 128)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(model.loss)(params, tokens), state, params)
        return optax.apply_updates(params, updates), state

    def train(after: Callable[[Any], Any]) -> float:
        now, state = jax.block_until_ready(step(params, tx.init(params)))
        start = time.perf_counter()
        for _ in range(2 * every):
            now, state = jax.block_until_ready(step(now, state))
            now = after(now)
        return (time.perf_counter() - start) / (2 * every)

    alone, ratios = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds + 1):
            alone.append(train(lambda now: now))
            island = gc.islands.join(
                f"{folder}/store",
                params,
                name=f"i{i}",
                folder=f"{folder}/own-{i}",
                compressor=gc.compressors.block_quantized(bits=4),
                every=every,
            )
            with island:
                island.begin(params)
                ratios.append(train(island.step) / alone[-1])
                assert island.diagnostics()["island/accepted"] >= 1
    # The first round compiles the code.
    return statistics.median(alone[1:]), ratios[1:]


def main() -> None:
    args = arguments()
    if args.training:
        step, ratios = training(args.rounds)
        worst, best, middle = max(ratios), min(ratios), statistics.median(ratios)
        print(
            f"a step of {step * 1e3:.0f} ms takes {middle:.3f} times as long with the exchange ({best:.3f} .. {worst:.3f})"
        )
        return
    base, _, power = args.entries.partition("^")
    entries = int(base) ** int(power or 1)
    print(f"{entries:,} parameters, {args.rounds} rounds\n")
    header = ["learning rate", "words changed", "times fewer bytes", "encode, MB/s", "decode, MB/s"]
    print(*_markdown.table(header, deltas(entries, args.rounds), align="r"), "", sep="\n")
    step = OuterStep(0.7, 0.9)
    state = step.init(np.random.default_rng(0).standard_normal(entries, np.float32))
    move = np.random.default_rng(1).standard_normal(entries, np.float32)
    outer = seconds(args.rounds, lambda: step(state, [(1.0, move), (2.0, move), (1.0, move)]))
    print(f"outer step of three payloads: {entries / outer / 1e6:.0f} million parameters a second\n")
    header = ["payload", "times fewer bytes", "encode, M/s", "decode, M/s"]
    print(*_markdown.table(header, payloads(entries, args.rounds), align="lr"), sep="\n")


if __name__ == "__main__":
    main()
