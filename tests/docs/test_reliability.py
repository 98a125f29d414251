"""Every promise of the page names a test that there is."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()


def test_every_promise_is_held_by_a_test() -> None:
    promised, rest = PAGE.split("## Not promised")
    _, *rows = re.split(r"^- ", promised, flags=re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert names, row
        for file, name in names:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"
    for variable, file in re.findall(r"(GRADCOMP_\w+)=\d+ .*?(tests/\S+\.py)", rest):
        text = (ROOT / file).read_text()
        assert variable in text or variable.removeprefix("GRADCOMP_RANDOM_") in text
