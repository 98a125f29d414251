"""Islands in network namespaces: one slow, one killed, one late, one cut off, and the store away; nothing is lost."""

import argparse

import pytest

from benchmarks import islands_training, lab

NEEDS = lab.available()


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS))
@pytest.mark.parametrize("islands", [3, 5])
def test_faults_over_slow_links_lose_nothing(islands: int) -> None:
    pytest.importorskip("obstore")
    for name in ("moto.server", "waitress"):
        pytest.importorskip(name, reason="no S3 server: pip install -e '.[bench]'")
    options = argparse.Namespace(
        steps=600, every=25, pace=0.05, grace=2.0, start=30.0, text="standard-library", islands=[islands]
    )
    plan = islands_training.Plan(slow=1.5, killed=0.3, late=0.15, apart=(0.4, 0.5), away=0.6, away_s=6.0)
    cell = islands_training.run(plan, options, islands, "bucket", alone=1 / options.pace)
    # The run itself holds every centre that an island had to that which follows from the store.
    print(cell)
    assert cell["rounds"] >= 4 and cell["payloads"] > cell["rounds"] and cell["landed"] >= 2 * islands
    assert cell["law"] < 1e-5
    assert cell["interfaces"] > cell["written"]
