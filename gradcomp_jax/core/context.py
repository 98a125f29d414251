"""What the transformations around an exchange tell it, under one key of optax's extra arguments."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gradcomp_jax._specs import path_name
from gradcomp_jax._typing import AxisName, PyTree

_KEY = "gradcomp_context"


@dataclasses.dataclass(frozen=True)
class Context:
    """Tells an exchange where it takes place.

    Attributes:
        inner_axis_name: the axis, or axes, of the devices that are one worker; ``None`` where each device is one.
        buckets: the leaves' numbers, bucket after bucket; ``None`` for one bucket of all.
        forward_order: returns the parameters' paths in the order of their first use; ``None`` where it is not known.
        not_gradients: what is exchanged instead of gradients, such as ``"differences from the centre"``; empty for gradients.
        describes: whether an exchange sends only zeros, in the shapes of its payloads, so that its bytes can be read from the
            traced program.
        weighted: the names of the axis whose workers' gradients are weighted, so that their mean is a weighted mean; ``None``
            where all count alike.
        dtypes: dtypes of the wanted updates, by the leaf's path, where the exchange is given wider gradients; ``None`` where
            updates have their gradients' dtypes. A transformation that changes the unit of a gradient removes it.
        weight_read: called when a ``weight=`` is read, so that whoever gave it knows that it was not dropped on the way.
    """

    inner_axis_name: AxisName | None = None
    buckets: Sequence[Sequence[int]] | None = None
    forward_order: Callable[[], Sequence[str]] | None = None
    not_gradients: str = ""
    describes: bool = False
    weighted: tuple[Any, ...] | None = None
    dtypes: Mapping[str, Any] | None = None
    weight_read: Callable[[], None] = lambda: None

    def wanted(self, updates: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Returns the leaves' shapes, with the dtypes that their updates are to have."""
        found, dtypes = jax.tree_util.tree_leaves_with_path(updates), self.dtypes or {}
        return [jax.ShapeDtypeStruct(g.shape, dtypes.get(path_name(path), g.dtype)) for path, g in found]


def context_of(extra: Mapping[str, Any]) -> Context:
    """Returns the context in the extra arguments; by default that of an exchange with nothing around it."""
    return extra.get(_KEY, Context())


def with_context(extra: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns extra arguments with some fields of their context replaced."""
    return {**extra, _KEY: dataclasses.replace(context_of(extra), **changes)}
