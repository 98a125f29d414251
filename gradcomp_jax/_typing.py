"""Type aliases shared by every layer."""

from collections.abc import Hashable
from typing import Any

import jax

Array = jax.Array
PyTree = Any
AxisName = Hashable
"""Name of a mesh, ``pmap`` or ``vmap`` axis, or a tuple of names that count as one axis."""
