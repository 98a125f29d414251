"""What the GPU compiler makes of every method: bytes and memory of train steps, memory passes and kernels of exchanges.

    python benchmarks/gpu.py                                     # prints all tables
    python benchmarks/gpu.py --table steps --write docs/gpu.md   # and writes them between the page's markers
    python benchmarks/gpu.py --topology '8 H100' --method dgc
    python benchmarks/gpu.py --table passes --rows rows.json
    python benchmarks/gpu.py --table launches --before docs/results/gpu-launches.json --write docs/gpu.md

Needs the plugin (docs/gpu.md says how to install it) and no GPU: programs are compiled, not run.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The host's own devices are not used, and the plugin would look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks import gpu_programs
from benchmarks.compiled import tables

if __name__ == "__main__":
    tables.main(__doc__, gpu_programs)
