"""Tables in the pages of the documentation, between their markers."""

import pathlib


def write_between(page: pathlib.Path, name: str, text: str) -> None:
    """Puts a text between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        SystemExit: if the page has no such markers.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has no {start} ... {end}")
    middle = f"{text.rstrip()}\n\n" if text.strip() else ""
    page.write_text(f"{before}{start}\n\n{middle}{end}{after}")
