"""Other people's compressors, timed as they are."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.subjects import Round, Start, Subject


def load_peers(paths: list[str], *, torch: bool) -> dict[str, Subject]:
    """Subjects for the given modules, and for PyTorch's hooks where torch is installed."""
    peers = {f"peer: {Path(path).stem}": from_module(path) for path in paths}
    if torch:
        if importlib.util.find_spec("torch") is None:
            print("PyTorch's hooks: left out, torch is not installed")
        else:
            peers |= {f"torch PowerSGD rank {rank}": Subject(powersgd(rank), "one process") for rank in (1, 4)}
            peers["torch quantization per tensor"] = Subject(quantization("quantization_pertensor_hook"), "8 bits")
            peers["torch quantization per channel"] = Subject(quantization("quantization_perchannel_hook"), "8 bits")
    return peers


def from_module(path: str) -> Subject:
    """A module with ``compress(array) -> payload`` and ``decompress(payload) -> array``."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("compress", "decompress"):
        if not callable(getattr(module, name, None)):
            raise SystemExit(f"{path} has no function {name}; a peer needs compress(array) and decompress(payload)")

    def start(x: jax.Array) -> Round:
        gradient = np.asarray(x)

        def step() -> None:
            module.decompress(module.compress(gradient))

        return Round(step)

    return Subject(start, path)


class Bucket:
    """What a communication hook asks of DDP's bucket."""

    def __init__(self, tensor: Any, matrix: Any) -> None:
        self._tensor, self._matrix = tensor, matrix

    def buffer(self) -> Any:
        return self._tensor

    def gradients(self) -> list[Any]:
        return [self._matrix]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def one_process() -> Any:
    """torch.distributed with a group of one process: what a hook does besides communicating."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.group.WORLD


def powersgd(rank: int) -> Start:
    """PowerSGD's hook on one bucket: compression and decompression in place."""

    def start(x: jax.Array) -> Round:
        gradient = np.asarray(x)
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        one_process()
        side = int(np.sqrt(gradient.size))
        tensor = torch.from_numpy(gradient[: side * side].copy())
        state = hooks.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        state.iter = 2
        bucket = Bucket(tensor, tensor.view(side, side))

        def step() -> None:
            hooks.powerSGD_hook(state, bucket).wait()

        return Round(step)

    return start


def quantization(name: str) -> Start:
    """PyTorch's 8-bit hooks on one bucket."""

    def start(x: jax.Array) -> Round:
        gradient = np.asarray(x)
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as hooks

        group = one_process()
        tensor = torch.from_numpy(gradient.copy())
        bucket = Bucket(tensor, tensor)

        def step() -> None:
            getattr(hooks, name)(group, bucket).wait()

        return Round(step)

    return start
