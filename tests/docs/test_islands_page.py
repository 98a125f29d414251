"""The page on islands runs as it is written, and names what is there."""

import re

import jax.numpy as jnp
import pytest

import gradcomp_jax as gc
from gradcomp_jax.islands.deciding import MOST_WINDOWS
from tests.docs.test_guides import DOCS, run, text_of
from tests.docs.test_method_pages import check_names_and_links


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_page_runs(monkeypatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.delenv("PLACE", raising=False)
    monkeypatch.delenv("ISLAND", raising=False)
    names, (trained, followed, weights) = run("islands")
    assert trained.startswith("london {'island/round': ")
    number = int(re.match(r"rounds: (\d+) shape: \(64, 16\)", followed)[1])
    assert number >= 3 and names["island"].diagnostics()["island/accepted"] >= 3
    assert weights.count("delta: ") == 3 and weights.endswith("version 6 equal: True\n")
    assert names["loss"](names["centre"], names["truth"].T) < names["loss"](names["params"], names["truth"].T)


def test_names_and_links_lead_somewhere() -> None:
    check_names_and_links(text_of("islands"), DOCS)


def test_the_page_says_what_is_refused_and_how_long_a_window_is() -> None:
    text = " ".join(text_of("islands").split())
    assert MOST_WINDOWS == 8 and "up to eight times as long" in text
    params = {"w": jnp.ones((8, 8))}
    for make in (
        lambda: gc.compressors.rotated(4, block=64),
        lambda: gc.compressors.in_frequency(gc.compressors.block_quantized(block=64)),
        lambda: gc.compressors.low_rank(2, (8, 8)),
    ):
        assert not gc.islands.codec(make(), params, mask=True).same_bits
