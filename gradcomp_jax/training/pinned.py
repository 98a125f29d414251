"""Finds per-device state that lies whole on every device: an update splits it again, so pinning it sends it in every step."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from gradcomp_jax import _checks, _compat, _specs
from gradcomp_jax._typing import AxisName, PyTree
from gradcomp_jax.per_device import is_per_device, nodes_of

_COST = (
    "What each worker keeps for itself, such as residuals, then crosses uncompressed in every step: pin the state by"
    " gradcomp_jax.state_shardings(state, mesh), or leave it as the update returns it"
)
# A pinned state is pinned in every step, so only the first few steps are checked, and the others cost nothing.
_LOOKED_AT = 3


def refuse_whole(state: PyTree, mesh: Mesh, axis_name: AxisName) -> None:
    """Refuses per-device state that is not split along an axis of Explicit type, where JAX does not place arrays."""
    names, types = _specs.names_of(axis_name), dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if _specs.devices_along(mesh, axis_name) == 1 or any(types[name] != AxisType.Explicit for name in names):
        return
    for value in _values(state):
        spec = jax.typeof(value).sharding.spec
        if not spec or not set(names) <= set(_specs.names_of(spec[0])):
            raise ValueError(
                f"the state is not split over {axis_name!r}, an axis of Explicit type: place it by"
                " jax.device_put(state, gradcomp_jax.state_shardings(state, mesh)), and pin it by nothing else"
            )


class PinWatch:
    """Warns of a state that is pinned replicated, if that can be seen before an update.

    A single replicated state is not an error: the update splits a state that was restored or placed by hand, and nothing is
    lost. So for arrays it warns after two such states in a row. A constraint in a program applies in each of its runs.
    """

    def __init__(self, mesh: Mesh, axis_name: AxisName) -> None:
        """Starts to watch the states of one step."""
        self._workers = _specs.devices_along(mesh, axis_name)
        self._looked, self._was_whole = 0, False
        self._last: Callable[[], Any] = lambda: None

    def __call__(self, state: PyTree) -> None:
        """Checks a state before an update."""
        if self._workers == 1 or self._looked >= _LOOKED_AT or not (values := _values(state)):
            return
        if _compat.is_traced(values[0]):
            if any(self._is_whole(_compat.pinned_to(value), value.shape) for value in values):
                _checks.warn(f"the state is pinned replicated, by a constraint before its update. {_COST}")
            return
        if self._last() is values[0]:
            # The same state again: nothing has moved it.
            return
        whole = any(self._is_whole(value.sharding, value.shape) for value in values)
        self._looked += 1
        if whole and self._was_whole:
            self._looked = _LOOKED_AT
            _checks.warn(f"two states in a row arrived replicated: something pins them between steps. {_COST}")
        self._last, self._was_whole = weakref.ref(values[0]), whole

    def _is_whole(self, place: Any, shape: tuple[int, ...]) -> bool:
        """Returns whether a device has more of a value than its own rows."""
        return place is not None and place.num_devices > 1 and place.shard_shape(shape)[0] * self._workers > shape[0]


def _values(state: PyTree) -> list[Any]:
    return [node.value for node in nodes_of(state, is_per_device) if isinstance(node.value, jax.Array)]
