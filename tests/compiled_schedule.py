"""Where collectives start in the schedule of a compiled train step of eight layers, beside its backward pass."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.compiled.programs import Topology, trace_step

LAYERS, WIDTH = 8, 1024
BUCKET = 4 * WIDTH * WIDTH
STARTS = r" = .*\s(all-to-all|all-gather|all-reduce|reduce-scatter|send)(-start)?\("


def loss(params, x):
    for name in sorted(params):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean(x**2)


def schedule(
    tx: optax.GradientTransformation, topology: Topology, options: dict[str, Any] | None = None
) -> tuple[list[tuple[int, str]], list[int]]:
    """Where collectives start and where matrix products of the backward pass are, in the order of the compiled program.

    Args:
        tx: goes before SGD.
        topology: what is compiled for.
        options: of the compiler.
    """
    layer = {
        "bias": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    }
    params = {f"layer_{i}": layer for i in range(LAYERS)}
    mesh = topology.mesh()
    batch = jax.ShapeDtypeStruct((64 * mesh.size, WIDTH), jnp.float32)
    traced = trace_step(loss, params, batch, optax.chain(tx, optax.sgd(0.1)), mesh, axis_name=topology.axis_name)
    text = traced.lower().compile(compiler_options=options).as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("ENTRY") :].splitlines()
    starts = [(n, m[1]) for n, line in enumerate(entry) if (m := re.search(STARTS, line))]
    backward = [n for n, line in enumerate(entry) if re.search(r'op_name="[^"]*transpose\(jvp[^"]*dot_general', line)]
    # A compiler may give the first layer's product, or one that it splits, another name.
    assert len(backward) >= LAYERS - 1
    return starts, backward
