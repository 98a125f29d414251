"""Bytes that one worker sends in a step, by method, for a model's gradient tree, read from compiled programs.

    python benchmarks/wire.py --model resnet50 --workers 8

No data and no training: the programs are compiled for simulated CPU devices and read, not run.
"""

import argparse
import os


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
    from gradcomp_jax.planning import MODELS

    if options.model not in MODELS:
        raise SystemExit(f"model must be one of {', '.join(MODELS)}, got {options.model!r}")
    params = MODELS[options.model]()
    mesh = jax.make_mesh((options.workers,), ("data",))
    methods = {
        "dense float32": gc.dense(axis_name="data"),
        "dense bfloat16": gc.dense(axis_name="data", dtype="bfloat16"),
        "terngrad": gc.terngrad(axis_name="data"),
        "terngrad, down='ternary'": gc.terngrad(axis_name="data", down="ternary"),
        f"dgc, density={options.density:g}": gc.dgc(axis_name="data", density=options.density),
    }
    reports = {
        name: gc.wire_bytes(gc.lower_update(params, tx, mesh, axis_name="data").compile())
        for name, tx in methods.items()
    }
    f32, bf16 = reports["dense float32"].sent, reports["dense bfloat16"].sent
    values = sum(leaf.size for leaf in params.values())
    print(
        f"{options.model}: {len(params)} leaves, {values:,} values, {options.workers} workers, jax {jax.__version__}\n"
    )
    print(
        "| method | bytes sent per worker and step | fewer than float32 | fewer than bfloat16 |\n|---|---:|---:|---:|"
    )
    for name, report in reports.items():
        print(f"| {name} | {report.sent:,} | {f32 / report.sent:.1f}x | {bf16 / report.sent:.1f}x |")
    if options.rows:
        for name, report in reports.items():
            print(f"\n{name}\n{report}")


if __name__ == "__main__":
    main()
