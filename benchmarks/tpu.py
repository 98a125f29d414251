"""What the TPU compiler makes of every method: bytes and memory of train steps, memory passes of exchanges.

    python benchmarks/tpu.py                                     # prints all tables
    python benchmarks/tpu.py --table steps --write docs/tpu.md   # and writes them between the page's markers
    python benchmarks/tpu.py --topology 'v5e 4x4' --method dgc
    python benchmarks/tpu.py --table passes --rows rows.json

Needs libtpu (pip install '.[tpu]') and no TPU: programs are compiled, not run.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The host's own devices are not used, and looking for a TPU would take the compiler's lock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks import tpu_programs
from benchmarks.compiled import tables

if __name__ == "__main__":
    tables.main(__doc__, tpu_programs)
