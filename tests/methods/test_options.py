"""No option is ignored in silence: each of them changes the program or the first state, or is refused."""

import inspect
import typing

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp_jax as gc
from gradcomp_jax.methods import registry
from tests.marks import slow_but

PARAMS = {"w": jax.ShapeDtypeStruct((48, 72), jnp.float32), "v": jax.ShapeDtypeStruct((3, 16, 24), jnp.float32)}


def one_leaf(params):
    return jax.tree.map(lambda p: p.ndim == 3, params)


OTHER = {
    "b1": 0.8,
    "b2": 0.99,
    "bits": 2,
    "block": 64,
    "bucket_size": 64,
    "clip": 1.0,
    "clip_norm": 1.0,
    "density": 0.2,
    "downlink_density": 0.5,
    "eps": 1e-3,
    "floor": 0.5,
    "fraction_bits": 9,
    "key": 7,
    "mask": one_leaf,
    "matrix": {"v": 1},
    "memory_dtype": "int8",
    "momentum": 0.5,
    "others": optax.identity(),
    "rank": 2,
    "rate": lambda step: 0.1 + step.astype(jnp.float32),
    "seed": 3,
    "view": "tree",
    "warm_up": ((3, 0.25),),
    "warm_up_steps": 7,
    "weight_decay": 0.1,
}
"""Values that are nobody's default, of what has too many to try all."""

REFUSED = {
    ("eden", "memory_dtype"): "error_feedback=False keeps nothing: leave memory_dtype out",
    ("one_bit_sgd", "block"): "granularity='column' takes whole columns as blocks, got block=64",
    ("stochastic_rounding", "bits"): "bits must be one of 16, 8, got 2",
    ("terngrad", "share_scale"): "downlink='exact' needs share_scale=True",
    ("topk_two_bits", "dtype"): "bits=2 says what values are, two magnitudes in bfloat16: leave dtype out",
}
"""What does not go with the defaults, and what the sentence says."""

TOGETHER = {
    "eden": ({"error_feedback": True}, {"memory_dtype": "int8"}),
    "one_bit_sgd": ({"granularity": "block"}, {"block": 64}),
    "stochastic_rounding": ({}, {"bits": 8}),
    "terngrad": ({"downlink": "ternary"}, {"share_scale": False}),
}
"""Options that say something beside others: the others, and what is added to them."""


def others(method: registry.Method, option: str) -> list:
    """Values of an option that are not its default."""
    default = method.options.get(option, inspect.signature(method.make).parameters[option].default)
    hint = typing.get_type_hints(method.make)[option]
    every = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if isinstance(default, bool):
        every = (True, False)
    if option == "collective":
        return list(method.collectives[1:])
    if option == "dtype":
        every = ("bfloat16", "float32")
    found = [value for value in every or [OTHER[option]] if value != default] or [None]
    return found


def update_of(tx) -> str:
    return gc.lower_update(PARAMS, tx, jax.make_mesh((8,), ("data",))).as_text()


def init_of(tx) -> str:
    start = jax.vmap(lambda _, params: tx.init(params), axis_name="data", in_axes=(0, None), axis_size=8)
    return jax.jit(start).lower(jax.ShapeDtypeStruct((8,), jnp.float32), PARAMS).as_text()


def ignored(name: str, before: dict, more: dict, program: str) -> bool:
    """Whether options make no difference to a method with others, of which this is the program."""
    build = registry.METHODS[name].build
    with_more = build(axis_name="data", **before, **more)
    return update_of(with_more) == program and init_of(with_more) == init_of(build(axis_name="data", **before))


@pytest.mark.parametrize("name", slow_but(("dense_bf16",), registry.METHODS))
def test_every_option_is_heard(name: str) -> None:
    method = registry.METHODS[name]
    program = update_of(method.build(axis_name="data"))
    # A text that changes by itself would show nothing.
    assert ignored(name, {}, {}, program)
    silent = []
    for option in inspect.signature(method.make).parameters.keys() - {"axis_name"}:
        for value in others(method, option):
            if (name, option) in REFUSED:
                with pytest.raises(ValueError, match=REFUSED[name, option]):
                    method.build(axis_name="data", **{option: value})
            elif ignored(name, {}, {option: value}, program):
                silent.append((option, value))
    assert not silent
    if name in TOGETHER:
        before, more = TOGETHER[name]
        assert not ignored(name, before, more, update_of(method.build(axis_name="data", **before)))


EXCHANGE = {
    "memory": gc.memory.none(),
    "collective": "two_phase",
    "mask": one_leaf,
    "view": "dealt",
    "dense_compressor": gc.compressors.dense("bfloat16"),
    "key": 7,
}


@pytest.mark.slow
def test_every_option_of_an_exchange_is_heard() -> None:
    code = gc.compressors.block_quantized(block=64, stochastic=True)
    assert EXCHANGE.keys() == inspect.signature(gc.exchange).parameters.keys() - {"compressor", "axis_name"}
    # One leaf is left out, for the dense compressor to have something to do.
    plain = {"axis_name": "data", "mask": lambda params: {"w": True, "v": False}}
    program = update_of(gc.exchange(code, **plain))
    assert program == update_of(gc.exchange(code, **plain))
    for option, value in EXCHANGE.items():
        assert update_of(gc.exchange(code, **{**plain, option: value})) != program, option


@pytest.mark.parametrize("name", ["dgc", "powersgd"])
def test_a_schedule_of_a_momentum_has_a_wrapper(name: str) -> None:
    with pytest.raises(TypeError, match=r"momentum must be a number, got a function: .* optax.inject_hyperparams"):
        registry.METHODS[name].build(axis_name="data", momentum=lambda step: 0.9)


@pytest.mark.parametrize(("name", "collective"), [("topk_sgd", "recursive_doubling"), ("dgc", "all_gather")])
def test_a_density_of_the_downlink_needs_a_downlink(name: str, collective: str) -> None:
    with pytest.raises(
        ValueError, match=r"downlink_density is about what owners send, and \w+ has no owners.*two_phase"
    ):
        registry.METHODS[name].build(axis_name="data", downlink_density=0.5, collective=collective)


def test_a_ternary_downlink_needs_a_downlink() -> None:
    for collective, named in (("all_gather", "AllGather"), ("all_reduce", "AllReduce")):
        with pytest.raises(
            ValueError, match=rf"downlink='ternary' is about what owners send, and {named} has no owners"
        ):
            gc.terngrad(axis_name="data", downlink="ternary", collective=collective)
    # Of scales of its own each worker's values are decoded by themselves, whatever the collective.
    gc.terngrad(axis_name="data", downlink="ternary", share_scale=False, collective="all_gather")


def test_masking_is_of_a_momentum() -> None:
    with pytest.raises(ValueError, match=r"masking=False is of the momentum inside.*leave masking out"):
        gc.dgc(axis_name="data", masking=False, momentum_correction=False)
