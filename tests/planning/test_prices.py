"""The planner weighs steps to a loss: prices by arithmetic, and what they do to a verdict."""

import jax
import jax.numpy as jnp
import pytest

import gradcomp_jax as gc
from gradcomp_jax.cli.plan_figures import to_dict
from gradcomp_jax.methods import METHODS
from gradcomp_jax.planning import (
    Calibration,
    Device,
    Fit,
    Price,
    Workload,
    break_even,
    predict,
    prices,
    should_compress,
)
from gradcomp_jax.planning.fitting import Point
from gradcomp_jax.planning.outlook import outlook
from gradcomp_jax.planning.task import task_of

WORK = Workload(0.1, ((1024, 1024),) * 20)
CLUSTER = gc.Cluster(8, gc.Link.of_bits(1e9, 50e-6))
SLOW = Device(20e9, {**dict.fromkeys(METHODS, 3.0), "dense": 1.0, "dense_bf16": 1.5})


def test_a_step_counts_for_what_it_brings() -> None:
    seconds = predict(WORK, CLUSTER, "dgc", device=SLOW, prices={})
    weighed = predict(WORK, CLUSTER, "dgc", device=SLOW, prices={"dgc": 1.5})
    assert weighed.step == seconds.step == seconds.progress
    assert weighed.progress == pytest.approx(1.5 * seconds.step)
    # Nothing trains better for being compressed, and a baseline has no price.
    assert predict(WORK, CLUSTER, "dgc", device=SLOW, prices={"dgc": 0.9}).progress == seconds.step
    with pytest.raises(
        ValueError, match="dense has no price, because it is what the steps of the others are held against"
    ):
        predict(WORK, CLUSTER, "dgc", device=SLOW, prices={"dense": 2.0})


def test_a_dense_warm_up_takes_the_seconds_of_dense() -> None:
    """A tenth of a run in dense steps: what is gained in the others is worth nothing in these."""
    price = Price(1.5, dense_steps=0.1)
    step, dense = (predict(WORK, CLUSTER, name, device=SLOW, prices={}).step for name in ("dgc", "dense"))
    found = predict(WORK, CLUSTER, "dgc", device=SLOW, prices={"dgc": price})
    assert found.step == step and found.progress == pytest.approx(1.5 * (0.9 * step + 0.1 * dense))
    assert "10% of its steps dense" in price.source
    rates = [break_even(WORK, CLUSTER, "dgc", device=SLOW, prices={"dgc": one}) for one in (Price(1.5), price)]
    assert rates[0] > rates[1] > 0
    # Of a link whose all-reduce was not measured, dense bfloat16 in two phases is what is known.
    points = (Point(1024, 1e-4, 1e-4, 1e-4), Point(2**26, 1.0, 1.0, 1.0))
    known = Calibration(8, dict.fromkeys(("all-gather", "all-to-all"), Fit(1e-4, 1e-8, points)), SLOW)
    step, dense = (predict(WORK, CLUSTER, n, calibration=known, prices={}).step for n in ("dgc", "dense_bf16"))
    found = predict(WORK, CLUSTER, "dgc", calibration=known, prices={"dgc": price})
    assert found.progress == pytest.approx(1.5 * (0.9 * step + 0.1 * dense))


def test_what_no_run_shows_does_not_recommend_a_method() -> None:
    """With a price dgc is recommended while it is worth it, although nothing is held against int8; then dense is."""
    methods = ["dgc", "block_quantized"]
    step = {p.method: p.step for p in should_compress(WORK, CLUSTER, methods=methods, device=SLOW, prices={}).ranking}
    worth = step["dense_bf16"] / step["dgc"]

    def verdict(price: float):
        return should_compress(WORK, CLUSTER, methods=methods, device=SLOW, prices={"dgc": price})

    paying = verdict(0.94 * worth)
    assert paying.method == "dgc" and [p.method for p in paying.ranking if p.method in methods] == methods
    assert paying.ranking[-1].progress < paying.ranking[0].progress
    assert paying.compress and paying.gain == pytest.approx(1 / 0.94)
    # The picture shows a few methods: what is recommended is among them.
    for given in ({"demo": 1.0}, {"dgc": 9.0, "terngrad": 9.0, "demo": 9.0, "block_quantized": 1.0}):
        found = outlook(WORK, CLUSTER, device=SLOW, prices=given)
        assert found.verdict.compress and found.verdict.method in found.by_rate[1]
    lost = verdict(0.97 * worth)
    assert not lost.compress and lost.method == "dense_bf16"
    assert lost.trains_worse is not None and lost.trains_worse.method == "dgc"


def test_a_method_that_trains_worse_is_not_recommended() -> None:
    """DGC is the fastest a step; from the price on that makes up for it, int8 is, and at last dense."""
    methods = ["dgc", "block_quantized"]

    def verdict(**given: float):
        return should_compress(WORK, CLUSTER, methods=methods, device=SLOW, prices=given)

    free = verdict()
    assert free.method == "dgc" and free.trains_worse is None
    step = {p.method: p.step for p in free.ranking}
    weighed = verdict(dgc=1.01 * step["block_quantized"] / step["dgc"], block_quantized=1.0)
    assert weighed.compress and weighed.method == "block_quantized"
    assert weighed.trains_worse is not None and weighed.trains_worse.method == "dgc"
    assert weighed.gain == pytest.approx(step["dense_bf16"] / step["block_quantized"])
    neither = verdict(dgc=100.0, block_quantized=100.0)
    assert not neither.compress and neither.method == "dense_bf16"
    assert neither.trains_worse is not None and neither.trains_worse.method == "dgc"
    assert [p.method for p in neither.ranking] == sorted(
        step, key=lambda name: step[name] * (1 if name.startswith("dense") else 100)
    )


def test_a_price_lowers_the_rate_from_which_dense_wins() -> None:
    rates = [break_even(WORK, CLUSTER, "dgc", device=SLOW, prices={"dgc": factor}) for factor in (1.0, 1.2, 2.0)]
    assert rates == sorted(rates, reverse=True) and rates[0] > 2 * rates[2] > 0
    found = outlook(WORK, CLUSTER, methods=["dgc"], device=SLOW, prices={"dgc": 1.2})
    assert found.break_even["dgc"] == rates[1]
    one = next(p for p in to_dict(found)["predictions"] if p["method"] == "dgc")
    assert one["price"]["steps"] == 1.2 and one["progress"] == pytest.approx(1.2 * one["step"])


def test_what_comes_with_the_package_is_the_default() -> None:
    """Of a task that is not known the highest of all kinds: a plan must not promise what one of them refutes."""
    for name, each in prices.measured().items():
        by_kind = {price.kind: predict(WORK, CLUSTER, name, device=SLOW, task=price.kind).price for price in each}
        assert all(price is not None and price.kind == kind for kind, price in by_kind.items())
        assert predict(WORK, CLUSTER, name, device=SLOW).price == max(by_kind.values(), key=lambda p: p.steps)


def test_bad_prices_are_named() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a price in steps must be finite and above 0"):
            Price(wrong)
    with pytest.raises(ValueError, match="the price of dgc must be a factor"):
        prices.from_dict({"dgc": "much"})
    with pytest.raises(ValueError, match="the price of dgc must be a factor"):
        prices.from_dict({"dgc": {"steps": 1.2, "colour": "red"}})
    for wrong in (
        {"steps": True},
        {"steps": 1.2, "task": 5},
        {"steps": 1.2, "page": 3},
        {"steps": 1.2, "reached": "no"},
    ):
        (field,) = set(wrong) - {"steps"} or {"steps"}
        with pytest.raises(ValueError, match=f"the price of dgc must be a factor.*: {field} of a price must be "):
            prices.from_dict({"dgc": wrong})
    with pytest.raises(ValueError, match=r"dense_steps of a price must be in \[0, 1\], got 15"):
        Price(1.0, dense_steps=15)
    with pytest.raises(ValueError, match="prices must be by method"):
        prices.from_dict([1.2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'block_quantized'"):
        predict(WORK, CLUSTER, "dgc", device=SLOW, prices={"block-quantized": 1.2})
    # Not a reason to leave every method out.
    with pytest.raises(ValueError, match="did you mean 'block_quantized'"):
        should_compress(WORK, CLUSTER, prices={"block-quantized": 1.2})
    read = prices.from_dict({"dgc": 1.2, "qsgd": {"steps": 1.1, "spread": [1.0, 1.2]}})
    assert read == {"dgc": Price(1.2), "qsgd": Price(1.1, spread=(1.0, 1.2))}


BIG = gc.Cluster(8, gc.Link.of_bits(1e8, 50e-6))


@pytest.mark.parametrize("optimizer", [None, "adamw", "adam"])
def test_dgc_is_not_recommended_for_a_transformer_on_a_price_of_a_conv_net(optimizer) -> None:
    """Its runs on one needed more than twice dense's steps; on a conv net a tenth more."""
    work = {task: Workload(0.1, WORK.shapes, task=task) for task in ("conv", "transformer")}
    for task, worth in (("conv", True), ("transformer", False)):
        ask = {"methods": ["dgc"], "device": SLOW, "optimizer": optimizer if task == "transformer" else None}
        found = should_compress(work[task], BIG, **ask)
        assert found.compress is worth and found == should_compress(WORK, BIG, task=task, **ask)
        (one,) = [p for p in found.ranking if p.method == "dgc"]
        assert one.price is not None and one.price.kind == task and (one.price.steps > 2) is not worth


@pytest.mark.parametrize(
    ("asked", "cluster"),
    [
        ({"task": "conv", "optimizer": "adamw"}, BIG),
        ({"task": "transformer", "optimizer": "muon"}, BIG),
        ({"task": "lstm", "optimizer": "sgd"}, BIG),
        ({"task": "conv"}, gc.Cluster(17, BIG.outer)),
        ({}, gc.Cluster(64, BIG.outer)),
    ],
    ids=str,
)
def test_a_method_without_a_comparable_price_is_ranked_last_and_not_recommended(asked, cluster) -> None:
    """However slow the link is; also where no method at all has one."""
    found = should_compress(WORK, cluster, methods=["dgc"], device=SLOW, **asked)
    assert not found.compress and found.method == "dense_bf16" and not found.tie
    assert found.ranking[-1].method == "dgc" and found.ranking[-1].price is None
    assert found.trains_worse is not None and found.trains_worse.method == "dgc"
    # Who asks for seconds has them.
    assert should_compress(WORK, cluster, methods=["dgc"], device=SLOW, prices={}, **asked).compress


def test_workers_count_as_they_exchange() -> None:
    """Sixteen devices in nodes of eight are two who exchange, and a run with eight workers is comparable."""
    nodes = gc.Cluster(64, BIG.outer, 8, gc.Link(100e9, 5e-6))
    for layout, known in (("hierarchical", True), ("flat", False)):
        one = predict(WORK, nodes, "dgc", device=SLOW, layout=layout, task="conv")
        assert (one.price is not None) is known


def test_a_state_that_does_not_fit_is_left_out() -> None:
    state = predict(WORK, BIG, "dgc", device=SLOW).state
    fits, too_large = (
        should_compress(WORK, BIG, methods=["dgc"], device=SLOW, prices={}, device_memory=memory)
        for memory in (state, 0.99 * state)
    )
    assert fits.compress and not fits.skipped
    assert not too_large.compress and "does not fit into the" in too_large.skipped["dgc"]


def test_the_kind_of_a_model_is_seen_by_names_and_shapes() -> None:
    def of(**shapes):
        return task_of({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})

    assert of(kernel=(3, 3, 64, 64)) == of(weight=(64, 3, 7, 7)) == "conv"
    assert of(self_attention=(64, 64)) == of(attn=(8, 8)) == of(q_proj=(8, 8)) == "transformer"
    assert of(lstm_0=(8, 32)) == of(OptimizedLSTMCell_0=(8, 8)) == of(gru=(8, 8)) == "lstm"
    # Stacked layers with heads, patches of pictures, plain matrices; and two things at once.
    assert of(w=(12, 768, 12, 64)) is None and of(patches=(16, 16, 3, 768)) is None and of(w=(1024, 1024)) is None
    assert of(attention=(64, 64), kernel=(3, 3, 64, 64)) is None
    for wrong in ({"task": "vit"}, {"optimizer": "sdg"}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            predict(WORK, BIG, "dgc", device=SLOW, **wrong)
    with pytest.raises(ValueError, match="task must be one of"):
        Workload(0.1, WORK.shapes, task="vit")
