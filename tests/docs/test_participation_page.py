"""The page on who takes part runs as it is written."""

import pytest

from tests.docs.test_guides import DOCS, run, text_of
from tests.docs.test_method_pages import check_names_and_links


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_page_runs() -> None:
    names, printed = run("participation")
    _, trained, loop, outer, joined, refused = printed
    value, skipped = trained.removeprefix("loss: ").split(" skipped: ")
    assert 0 < float(value) < 30 and int(skipped) == 0
    assert loop == joined == "" and (names["after"]["w"] != names["params"]["w"]).any()
    # Equal but for the rounding of parameters plus an update.
    assert float(outer.split(":")[1]) < 1e-6
    assert len(names["four"].params["w"].value) == 4
    assert refused.startswith("the workers do not start equal: ['w'] is not on workers 1 to 7 what it is on")


def test_names_and_links_lead_somewhere() -> None:
    check_names_and_links(text_of("participation"), DOCS)
