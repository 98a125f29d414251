"""Weight decay of a worker's own gradient, before anything is accumulated or sent."""

from typing import Any

import optax

from gradcomp_jax._typing import PyTree


def weight_decay(strength: Any) -> optax.GradientTransformation:
    r"""``optax.add_decayed_weights``, with an error that says where else a decay belongs.

    Args:
        strength: :math:`\lambda`.

    Raises:
        ValueError: when traced, without parameters.
    """
    plain = optax.add_decayed_weights(strength)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError(
                "weight_decay is added to a gradient and needs the parameters: call update(updates, state, params). Inside"
                " elastic_average, outer_average, local_sgd, diloco and rate_weighted what crosses is no gradient, and"
                " make_overlapped_step exchanges without parameters: leave weight_decay out, and give the decay to the inner"
                " optimizer, such as optax.adamw, or put optax.add_decayed_weights before it"
            )
        return plain.update(updates, state, params)

    return optax.GradientTransformation(plain.init, update)
