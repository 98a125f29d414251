"""Other people's compressors, timed as they are."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from subjects import Subject


def load_peers(paths: list[str], *, torch: bool) -> dict[str, Subject]:
    """Subjects for the given modules, and for PyTorch's hooks where torch is installed."""
    peers = {f"peer: {Path(path).stem}": from_module(path) for path in paths}
    if torch:
        if importlib.util.find_spec("torch") is None:
            print("PyTorch's hooks: left out, torch is not installed")
        else:
            peers |= {f"torch PowerSGD rank {rank}": Subject(powersgd(rank), "one process") for rank in (1, 4)}
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

    def start(gradient: np.ndarray) -> Callable[[], None]:
        def step() -> None:
            module.decompress(module.compress(gradient))

        return step

    return Subject(start, path)


def powersgd(rank: int) -> Any:
    """torch.distributed's PowerSGD hook on one bucket of the gradient, in a group of one process."""

    def start(gradient: np.ndarray) -> Callable[[], None]:
        import tempfile

        import torch
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        if not dist.is_initialized():
            store = dist.FileStore(tempfile.mktemp(), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        side = int(np.sqrt(gradient.size))
        tensor = torch.from_numpy(gradient[: side * side].copy())
        state = hooks.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        state.iter = 2

        class Bucket:
            """What the hook asks of DDP's bucket."""

            def buffer(self) -> Any:
                return tensor

            def gradients(self) -> list[Any]:
                return [tensor.view(side, side)]

            def index(self) -> int:
                return 0

            def is_last(self) -> bool:
                return True

        def step() -> None:
            hooks.powerSGD_hook(state, Bucket()).wait()

        return step

    return start
