"""Bytes of a row: what its compiled exchange sends, and what one worker hands over, as papers count it."""

import json
import math
import pathlib
from collections.abc import Sequence

import jax
import optax

import gradcomp_jax as gc
from benchmarks.adamw.rows import AXIS, ROWS
from benchmarks.adamw.task import MODELS, WORKERS, Task, vocabulary
from gradcomp_jax._files import write_whole


def sizes(task: Task, names: Sequence[str], file: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns a worker's bytes in a step by row: ``sent``, and ``payload``, what it hands over, which papers count.

    Args:
        task: whose model.
        names: of rows.
        file: what is known already, which is added to.
    """
    known = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        if name not in known:
            known[name] = _measured(task, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(known, indent=1, sort_keys=True).encode())
    return {name: known[name] for name in names}


def bfloat16(task: Task) -> dict[str, float]:
    """Returns the bytes of a dense all-reduce in bfloat16, with the optimum of a ring, 2 (N - 1) / N of the gradient."""
    shapes = _shapes(task)
    gradient = 2.0 * sum(math.prod(leaf.shape) for leaf in shapes.values())
    return {"sent": 2 * (WORKERS - 1) / WORKERS * gradient, "payload": gradient}


def _measured(task: Task, name: str) -> dict[str, float]:
    row = ROWS[name]
    tx = row.make(optax.constant_schedule(1e-3), 1000)
    mesh = jax.make_mesh((WORKERS,), (AXIS,))
    compiled = gc.lower_update(_shapes(task), tx, mesh, axis_name=AXIS, replicas=row.replicas).compile()
    if row.dense:
        first, later = (gc.wire_bytes(compiled, branch=branch) for branch in (0, -1))
        return {
            "sent": row.dense * first.sent + (1 - row.dense) * later.sent,
            "payload": row.dense * first.operand + (1 - row.dense) * later.operand,
        }
    if row.branches:
        reports = [(share, gc.wire_bytes(compiled, branch=branch)) for branch, share in enumerate(row.branches)]
        return {
            "sent": sum(share * report.sent for share, report in reports),
            "payload": sum(share * report.operand for share, report in reports),
        }
    operand = gc.wire_bytes(compiled).operand
    return {"sent": gc.mean_wire_bytes(compiled, every=row.every), "payload": operand / row.every}


def _shapes(task: Task) -> dict[str, jax.ShapeDtypeStruct]:
    model = MODELS[task.model]
    return jax.eval_shape(lambda: model.init(jax.random.key(0), vocabulary()))
