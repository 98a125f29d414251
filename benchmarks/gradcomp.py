"""``gradcomp`` with the tasks and recipes of the studies: fashion-mnist, mnist, cifar10, ablations and the rest.

    python benchmarks/gradcomp.py compare --task fashion-mnist --methods ablations
    python benchmarks/gradcomp.py compare --methods collectives
    python benchmarks/gradcomp.py methods

Commands and options are those of ``gradcomp``. Data sets come by ``python benchmarks/data.py NAME``.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import tasks
from gradcomp_jax.cli import main

if __name__ == "__main__":
    tasks.add()
    main()
