"""A task of the user's own: a function that returns a loss, parameters and batches."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp_jax._errors import SettingError, users_code
from gradcomp_jax.experiments.problem import Problem
from gradcomp_jax.experiments.settings import Settings

_DEFAULTS = {"epochs": 10, "learning_rate": 0.01, "density": 0.01, "clip_norm": None, "warm_up_epochs": 1}
_RETURNS = "(loss, params, batches) or (loss, params, batches, evaluation)"


class _Made(NamedTuple):
    """What the user's function has returned."""

    loss: Callable[[Any, Any], Any]
    params: Any
    batches: Any
    evaluation: Any


def own_problem(name: str, function: Callable[..., Any]) -> Problem:
    """Returns the problem that a function of the user's makes.

    ``function()``, or ``function(seed=seed)`` where it takes a seed, returns ``(loss, params, batches)`` or ``(loss, params,
    batches, evaluation)``:

    - ``loss(params, batch)``: the mean over the batch, a scalar; or ``(scalar, {"accuracy": scalar})``, or any other
      auxiliary output, which is left out.
    - ``params``: a tree of floating-point arrays.
    - ``batches``: an epoch of them, a list or a loader with a length; or ``batches(epoch)``, which returns one. A batch is a
      tree of arrays that lead with the examples of all workers together; all batches have the same shapes.
    - ``evaluation``: batches that the network is judged by, likewise; those of seed 0 are taken.

    The metric is the accuracy on ``evaluation``, the mean loss on it where there is none, and the mean loss of an epoch's
    steps where there is no ``evaluation``.
    """
    if not callable(function):
        raise SettingError(f"{name} must be a function that returns {_RETURNS}, got a {type(function).__name__}")
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    takes_seed = "seed" in inspect.signature(function).parameters

    @functools.lru_cache(maxsize=2)
    def made(seed: int) -> _Made:
        with users_code(name, file):
            found = function(seed=seed) if takes_seed else function()
        return _checked(name, found)

    def make(seed: int) -> _Made:
        return made(seed if takes_seed else 0)

    def epoch_of(seed: int, epoch: int) -> Any:
        batches = make(seed).batches
        with users_code(name, file):
            if callable(batches):
                batches = batches(epoch) if inspect.signature(batches).parameters else batches()
        return _sized(name, "batches", batches)

    first = make(0)
    steps = len(epoch_of(0, 0))
    with users_code(name, file):
        template = _arrays(name, "batches[0]", next(iter(epoch_of(0, 0))))
    with users_code(f"the loss of {name}", file):
        seen = jax.eval_shape(first.loss, first.params, template)
    has_aux, has_accuracy = _kind_of_loss(name, seen)
    shapes = _shapes(template)

    def batches(settings: Settings, seed: int, epoch: int) -> Iterator[Any]:
        source, count = iter(epoch_of(seed, epoch)), 0
        while True:
            with users_code(name, file):
                batch = next(source, None)
            if batch is None:
                break
            arrays = _arrays(name, f"batches[{count}]", batch)
            if _shapes(arrays) != shapes:
                raise SettingError(
                    f"{name}: batches[{count}] has shapes {_shapes(arrays)[1]} where batches[0] has {shapes[1]}: make all"
                    " batches alike, and leave out a smaller last one"
                )
            count += 1
            yield arrays
        if count != steps:
            raise SettingError(
                f"{name}: epoch {epoch} of seed {seed} has {count} batches and the first one had {steps}"
            )

    def loss(params: Any, batch: Any) -> jax.Array:
        found = first.loss(params, batch)
        return found[0] if has_aux else found

    def init(seed: int) -> Any:
        params = make(seed).params
        if _shapes(params) != _shapes(first.params):
            raise SettingError(f"{name}: the parameters of seed {seed} have other shapes than those of seed 0")
        return params

    judged: jax.stages.Wrapped = jax.jit(lambda p, b: first.loss(p, b)[1]["accuracy"] if has_accuracy else loss(p, b))

    def evaluate(params: Any) -> float:
        total, examples = 0.0, 0
        for index, batch in enumerate(_sized(name, "evaluation", first.evaluation)):
            arrays = _arrays(name, f"evaluation[{index}]", batch)
            size = len(jax.tree.leaves(arrays)[0])
            with users_code(f"the loss of {name}", file):
                total += size * float(judged(params, arrays))
            examples += size
        return total / examples

    evaluated = first.evaluation is not None
    if evaluated and not len(_sized(name, "evaluation", first.evaluation)):
        raise SettingError(f"{name}: evaluation is empty: return batches, or leave it out")
    return Problem(
        name=name,
        settings=Settings(workers=1, batch_per_worker=len(jax.tree.leaves(template)[0]), **_DEFAULTS),  # type: ignore[arg-type]
        init=init,
        loss=loss,
        steps_per_epoch=lambda settings: steps,
        batches=batches,
        evaluate=evaluate if evaluated else None,
        metric=("accuracy" if has_accuracy else "evaluation loss") if evaluated else "training loss",
        has_seeds=takes_seed,
    )


def is_task(found: Any) -> bool:
    """Says whether a value has the form of what :func:`own_problem` takes."""
    return isinstance(found, tuple) and len(found) in (3, 4) and callable(found[0])


def _checked(name: str, found: Any) -> _Made:
    if not is_task(found):
        what = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
        if isinstance(found, tuple) and len(found) in (3, 4):
            what += f" that starts with a {type(found[0]).__name__}"
        raise SettingError(f"{name} must return {_RETURNS}, got {what}; loss is a function of params and a batch")
    loss, params, batches, *rest = found
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise SettingError(f"{name}: params has no arrays: there is nothing to train")
    for path, leaf in leaves:
        where = "params" + jax.tree_util.keystr(path)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise SettingError(
                f"{name}: {where} is a {type(leaf).__name__}, not an array: leave out what is not trained"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise SettingError(f"{name}: {where} is {leaf.dtype}, not floating point: leave out what is not trained")
    return _Made(loss, jax.tree.map(jnp.asarray, params), batches, rest[0] if rest else None)


def _sized(name: str, which: str, batches: Any) -> Any:
    """Batches that can be counted and read again, or an error that says how to make them so."""
    if hasattr(batches, "shape") or isinstance(batches, dict) or not isinstance(batches, Iterable):
        raise SettingError(f"{name}: {which} is a {type(batches).__name__}: return a list of batches")
    try:
        count = len(batches)  # type: ignore[arg-type]
    except TypeError as error:
        raise SettingError(
            f"{name}: {which} is a {type(batches).__name__}, which has no length: return a list of batches, or a loader that"
            " has one"
        ) from error
    if not count and which == "batches":
        raise SettingError(f"{name}: batches is empty: return at least one batch")
    return batches


def _arrays(name: str, which: str, batch: Any) -> Any:
    """Returns a batch as NumPy arrays with the dtypes that JAX gives them."""
    sizes = set()

    def array(path: Any, leaf: Any) -> np.ndarray:
        where = which + jax.tree_util.keystr(path)
        values = np.asarray(leaf)
        if values.dtype.kind in "OSU":
            raise SettingError(f"{name}: {where} is a {type(leaf).__name__}, not an array of numbers")
        if not values.ndim:
            raise SettingError(f"{name}: {where} has no dimension of examples, with which arrays of a batch lead")
        sizes.add(len(values))
        return values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)

    arrays = jax.tree_util.tree_map_with_path(array, batch)
    if len(sizes) != 1 or 0 in sizes:
        listed = ", ".join(map(str, sorted(sizes))) or "no"
        raise SettingError(
            f"{name}: {which} has arrays of {listed} examples: a batch is a tree of arrays that lead with the same number of"
            " examples, at least one, and batches is a list of batches"
        )
    return arrays


def _shapes(tree: Any) -> tuple[Any, list[str]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]


def _kind_of_loss(name: str, seen: Any) -> tuple[bool, bool]:
    """Returns whether a loss has auxiliary output, and an accuracy in it."""
    has_aux = isinstance(seen, tuple) and len(seen) == 2
    value, aux = seen if has_aux else (seen, None)
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        shown = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"
        raise SettingError(
            f"{name}: loss must return a floating-point scalar, the mean over the batch, or (scalar, aux); got {shown}"
        )
    accuracy = aux.get("accuracy") if isinstance(aux, dict) else None
    if accuracy is not None and accuracy.shape != ():
        raise SettingError(f"{name}: accuracy must be a scalar, the mean over the batch, got {list(accuracy.shape)}")
    return has_aux, accuracy is not None
