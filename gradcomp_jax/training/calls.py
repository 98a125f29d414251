"""Refuses calls of a step with something else than a state and a batch."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from gradcomp_jax._typing import PyTree
from gradcomp_jax.per_device import is_per_device


def refuse_no_state(state: Any) -> None:
    """Refuses anything but a train state: parameters, an optimizer's state, or all that a step returned."""
    if hasattr(state, "params") and hasattr(state, "opt_state"):
        return
    if type(state) is tuple and state and hasattr(state[0], "opt_state"):
        raise TypeError(
            "a step returns (state, metrics), and is given that pair as its state: write state, metrics = step(state, batch)"
        )
    raise TypeError(
        f"a step is called as step(state, batch), and its state is a {type(state).__name__} without params and opt_state: make"
        " one with state = gradcomp_jax.init_state(params, tx, mesh), and go on with the one that each step returns"
    )


@contextlib.contextmanager
def call_explained(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Says what a step is called with, if JAX refuses the arguments of a call, or they lie on other devices."""
    try:
        yield
    except (TypeError, ValueError) as error:
        said, remedy = str(error), ""
        if "incompatible devices for jitted computation" in said:
            raise ValueError(
                f"the state or the batch lies on other devices than the {mesh.size} of the step's mesh: make the state on that"
                " mesh with gradcomp_jax.init_state, or restore a checkpoint into such a one, and place the batch with"
                " jax.device_put(batch, gradcomp_jax.data_sharding(mesh))"
            ) from error
        if found := re.search(
            r"problematic value is of type <class '([\w.]+)'> and was passed.* at path (\S+)\.\n", said
        ):
            remedy = (
                f"{found[2]} is of type {found[1].rpartition('.')[2]} and no array, and a step is called with arrays: take it"
                " out of the batch, close over it in the loss, or give next(...) of an iterator of batches"
            )
        elif re.search(r"make_\w+step\.<locals>\.step\(\) (takes|missing)", said):
            remedy = (
                "a step takes a state and one batch, a tree of arrays: step(state, batch), or step(state, (x, y)) for several"
                " arrays"
            )
        if not remedy or not isinstance(error, TypeError):
            raise
        raise TypeError(remedy) from error


def refuse_other_gradient(gradient: PyTree, params: PyTree) -> None:
    """Refuses a gradient that has another number of arrays than the parameters."""
    # Only one set of optax.lookahead's parameters has gradients.
    wanted = len(jax.tree.leaves(getattr(params, "fast", params)))
    found = len(jax.tree.leaves(gradient, is_leaf=is_per_device))
    if params is not None and found != wanted:
        raise ValueError(
            f"update is given a gradient of {found} arrays and parameters of {wanted}: call tx.update(gradient, state, params),"
            " with the gradient alone of value, gradient = gradcomp_jax.local_value_and_grad(loss, ...)(params, batch)"
        )
