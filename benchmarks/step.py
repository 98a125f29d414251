"""What the whole exchange costs a compiler and a memory, on a model's gradient tree: no data, no training.

    python benchmarks/step.py --model resnet50 --workers 8
    python benchmarks/step.py --tpu v5e:2x4

For each method: seconds to trace and to compile, temporaries, and memory passes (bytes that the compiler says the program
reads and writes, over the bytes of the gradient). ``--tpu`` compiles for a TPU topology, which needs libtpu and no TPU.
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
    parser.add_argument("--tpu", default="", help="a topology such as v5e:2x4, in place of simulated CPU workers")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    flag = f"--xla_force_host_platform_device_count={options.workers}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    import jax
    import numpy as np
    from jax.experimental import topologies

    import gradcomp_jax as gc
    from gradcomp_jax.planning import MODELS

    if options.model not in MODELS:
        raise SystemExit(f"model must be one of {', '.join(MODELS)}, got {options.model!r}")
    params = MODELS[options.model]()
    topology = topologies.get_topology_desc(platform="tpu", topology_name=options.tpu) if options.tpu else None
    devices = jax.devices() if topology is None else topology.devices
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    methods = {
        "dense float32": gc.dense(axis_name="data"),
        "dense bfloat16": gc.dense(axis_name="data", dtype="bfloat16"),
        "terngrad": gc.terngrad(axis_name="data"),
        "dgc": gc.dgc(axis_name="data", density=options.density),
    }
    values = sum(leaf.size for leaf in params.values())
    print(
        f"{options.model}: {len(params)} leaves, {values:,} values; {len(devices)} x {devices[0].device_kind},"
        f" jax {jax.__version__}, {os.cpu_count()} cores compile\n"
    )
    print("| method | trace s | compile s | temporaries / gradient | memory passes |\n|---|---:|---:|---:|---:|")
    for name, tx in methods.items():
        start = time.perf_counter()
        lowered = gc.lower_update(params, tx, mesh, axis_name="data")
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
        temporaries = compiled.memory_analysis().temp_size_in_bytes / (4 * values)
        passes = compiled.cost_analysis()["bytes accessed"] / (4 * values)
        print(f"| {name} | {traced - start:.1f} | {done - traced:.1f} | {temporaries:.2f} | {passes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
