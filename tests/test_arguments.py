"""Arguments that a public function cannot take: every message names the argument, and what to write in its place."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax import _arguments

OVER = {"axis_name": "data"}
DGC = gc.dgc(**OVER)
TOPK = gc.compressors.topk(0.1)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",))


SENTENCES = {
    "a number of steps for stages": (
        lambda: gc.dgc(**OVER, warm_up=100),
        r"warm_up must be .*gradcomp_jax\.warm_up\(100\)",
    ),
    "one stage": (lambda: gc.dgc(**OVER, warm_up=(100, 0.1)), r"warm_up must be stages .*gradcomp_jax\.warm_up\(100\)"),
    "a list of one axis": (
        lambda: gc.dgc(axis_name=["data"]),
        r"a string, or a tuple of names.*write axis_name='data'",
    ),
    "a list of axes": (lambda: gc.terngrad(axis_name=["a", "b"]), r"write axis_name=\('a', 'b'\)"),
    "a list for a step": (lambda: gc.make_train_step(len, DGC, mesh(), axis_name=["data"]), r"write axis_name='data'"),
    "a bound in quotes": (
        lambda: gc.by_size({"0": "dense"}),
        r"bound of a rule must be a number, got '0': .*without quotes",
    ),
    "a class for a collective": (
        lambda: gc.exchange(TOPK, **OVER, collective=gc.collectives.TwoPhase),
        r"collective must be .*call it",
    ),
    "a function for a memory": (lambda: gc.exchange(TOPK, **OVER, memory=gc.memory.residual), r"residual\(\).*call it"),
    "a mesh for an axis": (lambda: gc.dense(axis_name=mesh()), r"write axis_name='data'"),
    "bits in quotes": (lambda: gc.block_quantized(**OVER, bits="4"), r"bits must be a whole number.*without quotes, 4"),
    "bits of a compressor": (lambda: gc.compressors.rotated("4"), r"bits must be a whole number.*without quotes, 4"),
    "a density in quotes": (lambda: gc.dgc(**OVER, density="0.01"), r"density must be a number.*without quotes, 0\.01"),
    "a momentum in quotes": (lambda: gc.dgc(**OVER, momentum="0.9"), r"momentum must be a number, such as 0\.9"),
    "a norm in quotes": (lambda: gc.dgc(**OVER, clip_norm="4"), r"clip_norm must be a number"),
    "a rule by name": (lambda: gc.by_path("w1", "topk"), r"write gradcomp_jax\.compressors\.topk\(0\.01\)"),
    "a rule by its function": (
        lambda: gc.by_path("w1", gc.compressors.topk),
        r"the function topk: write gradcomp_jax\.compressors\.topk\(0\.01\)",
    ),
    "a transformation as a rule": (lambda: gc.by_path("w1", DGC), r"optax\.chain by itself.*gradcomp_jax\.compressors"),
    "a transformation by size": (lambda: gc.by_size({0: DGC}), r"optax\.chain by itself.*gradcomp_jax\.compressors"),
    "a transformation otherwise": (lambda: gc.by_path("w1", "dense", otherwise=DGC), r"got a gradient transformation"),
    "a transformation to exchange": (
        lambda: gc.exchange(DGC, **OVER),
        r"optax\.chain by itself.*gradcomp_jax\.compressors",
    ),
    "a name to exchange": (lambda: gc.exchange("topk", **OVER), r"write gradcomp_jax\.compressors\.topk\(0\.01\)"),
    "an axis by position": (
        lambda: gc.dgc("data"),
        r"dgc\(\) takes no arguments by position: .*such as axis_name='data'",
    ),
    "two by position": (lambda: gc.dgc("data", 0.01), r"such as axis_name='data', density=0\.01"),
    "an axis after a compressor": (lambda: gc.exchange(TOPK, "data"), r"only compressor by position.*axis_name='data'"),
    "a number of fragments": (lambda: gc.fragments(2), r"fragments\(\) is missing 'layers': give layers=\('embed',"),
    "no axis": (lambda: gc.dgc(), r"dgc\(\) is missing 'axis_name': give axis_name='data'"),
    "a misspelt option": (lambda: gc.dgc(**OVER, densty=0.1), r"argument 'densty': did you mean 'density'"),
    "a method not called": (lambda: gc.make_train_step(len, gc.dgc, mesh()), r"call it first, with its axis_name"),
    "a compressor in a step": (lambda: gc.make_train_step(len, TOPK, mesh()), r"gradcomp_jax\.exchange\(compressor, "),
    "a compressor for replicas": (lambda: gc.diloco(TOPK, **OVER), r"gradcomp_jax\.exchange\(compressor, axis_name"),
    "a memory by name": (
        lambda: gc.exchange(TOPK, **OVER, memory="residual"),
        r"such as gradcomp_jax\.memory\.residual",
    ),
    "a dtype that is none": (lambda: gc.dgc(**OVER, dtype="bf16"), r"dtype must be a dtype, such as 'bfloat16'"),
    "text for yes": (lambda: gc.dgc(**OVER, nesterov="yes"), r"nesterov must be True or False, got 'yes'"),
    "an axis for a mesh": (lambda: gc.init_state({}, DGC, "data"), r"mesh must be a mesh, such as jax\.make_mesh"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_message_says_what_to_write(case: str) -> None:
    call, sentence = SENTENCES[case]
    with pytest.raises(TypeError, match=sentence):
        call()


GOOD = {
    "axis_name": "data",
    "inner_axis_name": "inner",
    "method": DGC,
    "exchange": DGC,
    "inner": optax.sgd(0.1),
    "optimizer": optax.sgd(0.1),
    "outer": DGC,
    "tx": DGC,
    "every": 4,
    "delay": 1,
    "warm_up_steps": 10,
    "loss": lambda params, batch: 0.0,
    "compressor": TOPK,
    "dense": gc.compressors.dense(),
    "pattern": "w",
    "rule": "dense",
    "rules": {0: "dense"},
    "densities": (0.1, 0.01),
    "target_error": 0.1,
    "schedule": lambda step: 0.1,
    "number": 2,
    "layers": ("a", "b"),
    "bucket_bytes": 1000,
    "candidates": {"a": DGC},
    "rank": 4,
    "shape": (8, 8),
    "size": 10,
    "max_norm": 1.0,
    "steps_per_stage": 10,
}
"""What required arguments may be; functions that need others are called with wrong names and numbers of arguments alone."""

BAD = ("4", "abc", b"x", None, True, float("nan"), float("inf"), -1, 0, 10**9, [1], ["data"], (1, 2), {"a": 1}, 1j, len)
BAD += (np.int64(4), np.float32(0.5), DGC, gc.compressors.topk)

RAW = (
    "NoneType",
    "object is not",
    "no attribute",
    "not supported between",
    "unsupported operand",
    "required keyword-only",
)
RAW += ("cannot unpack", "unhashable", "must be real number", "not understood", "cannot convert", "could not convert")
RAW += ("invalid literal", "Cannot interpret", "not a valid JAX", "bad operand", "positional arguments but")


def face() -> dict[str, Callable[..., Any]]:
    """The public functions, by the names that users write."""
    found = {}
    for where in (gc, gc.compressors, gc.memory, gc.replicas, gc.masks):
        for function in vars(where).values():
            if inspect.isfunction(function) and hasattr(function, "__wrapped__"):
                found[_arguments.public_name(function)] = function
    return found


FACE = face()


def test_every_public_function_checks_its_arguments() -> None:
    plain = {
        name
        for name, function in vars(gc).items()
        if inspect.isfunction(function) and not name.startswith("_") and not hasattr(function, "__wrapped__")
    }
    assert not plain
    assert {"gradcomp_jax.dgc", "gradcomp_jax.compressors.topk", "gradcomp_jax.memory.residual"} <= set(FACE)


@pytest.mark.parametrize("name", sorted(FACE))
def test_a_public_function_names_the_remedy(name: str) -> None:
    function = FACE[name]
    parameters = inspect.signature(function).parameters.values()
    open_ended = {p.kind for p in parameters} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not open_ended:
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'misspelt': (did you mean|it takes)"):
            function(misspelt=1)
        with pytest.raises(TypeError, match="by position: "):
            function(*range(20))
    if required:
        with pytest.raises(TypeError, match=f"is missing '{required[0]}'.*: give {required[0]}="):
            function()
    if open_ended or not set(required) <= set(GOOD):
        return
    good = {each: GOOD[each] for each in required}
    raw = []
    for parameter in parameters:
        for value in BAD:
            try:
                function(**{**good, parameter.name: value})
            except (TypeError, ValueError, NameError) as error:
                if any(words in str(error) for words in RAW):
                    raw.append(f"{parameter.name}={value!r}: {error}")
    assert not raw


def test_the_scalars_of_numpy_are_numbers() -> None:
    assert gc.compressors.topk(np.float64(0.5), block=np.int64(64)) == gc.compressors.topk(0.5, block=64)
    assert gc.compressors.topk(np.float32(0.5), exact=np.bool_(True)) == gc.compressors.topk(0.5, exact=True)


def test_signatures_are_the_functions_own() -> None:
    assert list(inspect.signature(gc.exchange).parameters)[:3] == ["compressor", "axis_name", "memory"]
    assert gc.exchange.__name__ == "exchange" and gc.exchange.__doc__.startswith("Averages compressed gradients")


def test_an_option_under_inject_hyperparams_is_an_array() -> None:
    tx = optax.inject_hyperparams(gc.dgc, static_args=("density", "block"))(**OVER, momentum=0.9, density=0.1)
    assert set(tx.init({"w": np.ones((4, 4), np.float32)}).hyperparams) >= {"momentum"}
