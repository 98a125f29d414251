"""What an exchange sends and what it costs a compiler, by method, for a model's gradient tree.

    python benchmarks/wire.py --model resnet50 --workers 8

No data and no training: the programs are compiled for simulated workers and read, not run. Printed are the bytes that one
worker sends in a step; the seconds to trace and to compile; and, by the compiler's own count, temporaries, and bytes read and
written, both over those of the gradient. benchmarks/tpu.py and benchmarks/gpu.py do the same for accelerators.
"""

import argparse
import os
import time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="resnet50", help="a name in gradcomp_jax.planning.MODELS (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=8, help="simulated workers (default: %(default)s)")
    parser.add_argument("--density", type=float, default=1e-3, help="of DGC (default: %(default)s)")
    parser.add_argument("--rows", action="store_true", help="also print each program's collectives")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    flag = f"--xla_force_host_platform_device_count={options.workers}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    import gradcomp_jax as gc
    from gradcomp_jax import _markdown
    from gradcomp_jax.planning import MODELS

    if options.model not in MODELS:
        raise SystemExit(f"model must be one of {', '.join(MODELS)}, got {options.model!r}")
    params = MODELS[options.model]()
    mesh = jax.make_mesh((options.workers,), ("data",))
    methods = {
        "dense float32": gc.dense(axis_name="data"),
        "dense bfloat16": gc.dense(axis_name="data", dtype="bfloat16"),
        "terngrad": gc.terngrad(axis_name="data"),
        "terngrad, downlink='ternary'": gc.terngrad(axis_name="data", downlink="ternary"),
        f"dgc, density={options.density:g}": gc.dgc(axis_name="data", density=options.density),
    }
    values = sum(leaf.size for leaf in params.values())
    reports, costs = {}, []
    for name, tx in methods.items():
        start = time.perf_counter()
        lowered = gc.lower_update(params, tx, mesh, axis_name="data")
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
        reports[name] = gc.wire_bytes(compiled)
        temporaries = compiled.memory_analysis().temp_size_in_bytes / (4 * values)
        passes = compiled.cost_analysis()["bytes accessed"] / (4 * values)
        costs.append((name, f"{traced - start:.1f}", f"{done - traced:.1f}", f"{temporaries:.2f}", f"{passes:.1f}"))
    f32, bf16 = reports["dense float32"].sent, reports["dense bfloat16"].sent
    print(
        f"{options.model}: {len(params)} leaves, {values:,} values; {options.workers} simulated workers,"
        f" jax {jax.__version__}, {os.cpu_count()} cores compile\n"
    )
    sent = ((name, f"{r.sent:,}", f"{f32 / r.sent:.1f}x", f"{bf16 / r.sent:.1f}x") for name, r in reports.items())
    heads = ("method", "bytes sent per worker and step", "fewer than float32", "fewer than bfloat16")
    print("\n".join(_markdown.table(heads, sent, align="lr")), "\n")
    heads = ("method", "trace s", "compile s", "temporaries / gradient", "memory passes")
    print("\n".join(_markdown.table(heads, costs, align="lr")))
    if options.rows:
        for name, report in reports.items():
            print(f"\n{name}\n{report}")


if __name__ == "__main__":
    main()
