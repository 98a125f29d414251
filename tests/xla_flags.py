"""XLA flags of the tests and of the processes that they start. Imports no jax, which reads the flags when it is imported."""

import importlib.metadata

# The programs are many and small, and most of the suite's time is compilation: with these it takes a third of the time.
_FAST_COMPILATION = {"--xla_backend_optimization_level": "0"}
if tuple(int(number) for number in importlib.metadata.version("jaxlib").split(".")[:2]) < (0, 11):
    _FAST_COMPILATION |= {
        "--xla_cpu_use_fusion_emitters": "false",
        # Two processes of tests keep two cores busy.
        "--xla_cpu_parallel_codegen_split_count": "1",
        # Without the emitters LLVM joins a product and a sum where it likes. AVX has no such instruction, so that two programs
        # of one arithmetic give the same bits.
        "--xla_cpu_max_isa": "AVX",
    }


def xla_flags(devices: int, flags: str = "") -> str:
    """Returns flags that ask for simulated CPU devices and fast compilation, other flags kept as they were."""
    ours = {"--xla_force_host_platform_device_count": str(devices)} | _FAST_COMPILATION
    kept = [flag for flag in flags.split() if flag.split("=")[0] not in ours]
    return " ".join([*kept, *(f"{name}={value}" for name, value in ours.items())])
