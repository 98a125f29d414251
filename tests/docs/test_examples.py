"""Every public function has an example in its docstring, and it runs."""

import doctest
import functools
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp_jax as gc
from tests.docs.test_site import names_of
from tests.marks import slow_but

FUNCTIONS = sorted(name for name, value in names_of(gc).items() if callable(value) and not isinstance(value, type))
FUNCTIONS += ["testing.assert_wire"]
QUICK = ("topk_sgd", "dgc", "exchange", "init_state", "make_train_step", "wire_bytes", "fragments", "predict")


def loss(params: dict, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["kernel"] + params["bias"]) ** 2)


@pytest.mark.parametrize("name", slow_but(QUICK, FUNCTIONS))
@pytest.mark.standard_promotion
def test_the_example_runs(name: str, mesh8: jax.sharding.Mesh, tmp_path: Path) -> None:
    shared = {
        "mesh": mesh8,
        "params": {"kernel": jnp.ones((256, 256)), "bias": jnp.zeros(256)},
        "batch": jax.device_put(jnp.ones((16, 256)), gc.data_sharding(mesh8)),
        "loss": loss,
        "folder": tmp_path,
    }
    modules = {"functools": functools, "gc": gc, "jax": jax, "jnp": jnp, "optax": optax}
    (test,) = doctest.DocTestFinder(recurse=False).find(
        operator.attrgetter(name)(gc), name, module=False, globs=modules | shared
    )
    assert test.examples, f"add an example to the docstring of gradcomp_jax.{name}"
    failures: list[str] = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)
