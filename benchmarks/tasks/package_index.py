"""A file of the package index that pip is configured with, as it lies there.

``pip download`` builds a source distribution to learn its metadata, which runs what was downloaded. So pip only says where its
index is, and the file is fetched from there.
"""

import contextlib
import html.parser
import os
import pathlib
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from benchmarks.tasks.archives import LARGEST
from gradcomp_jax._errors import SettingError

_LARGEST_PAGE = 1 << 24
_PATIENCE_S = 60.0


def download(project: str, file: str, folder: pathlib.Path, *, run: Callable[..., Any] = subprocess.run) -> None:
    """Fetches a file of a project into a folder; it is neither unpacked nor looked at.

    Args:
      project: its normalized name.
      file: the file's name.
      folder: where to.
      run: what runs pip, as :func:`subprocess.run` does.

    Raises:
      SettingError: if there is no such file in pip's index, or the index does not answer.
      OSError: if the file cannot be written.
    """
    index = _index(run)
    page = f"{index.rstrip('/')}/{project}/"
    links = _Links()
    links.feed(_fetched(page, _LARGEST_PAGE).decode(errors="replace"))
    for link in links.found:
        address = urllib.parse.urljoin(page, link).partition("#")[0]
        if urllib.parse.unquote(urllib.parse.urlsplit(address).path).rpartition("/")[2] == file:
            (folder / file).write_bytes(_fetched(address, LARGEST))
            return
    raise SettingError(f"pip's index has no {file}")


def _index(run: Callable[..., Any]) -> str:
    """The index that pip takes, by its configuration, the environment or its default, as its help says."""
    try:
        said = run(
            ("pip", "download", "--help"),
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "4000"},
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SettingError(f"pip does not say where its index is ({error}): install pip") from error
    found = re.search(r"--index-url <url>.*?\(default:?\s+(https?://[^\s)]+)\)", said, re.DOTALL)
    if found is None or "@" in urllib.parse.urlsplit(found[1]).netloc:
        raise SettingError("pip's index is no http address, or needs a password, which pip does not tell")
    return found[1]


def _fetched(address: str, limit: int) -> bytes:
    if urllib.parse.urlsplit(address).scheme not in ("http", "https"):
        raise SettingError("pip's index leads to an address that is neither http nor https")
    request = urllib.request.Request(address, headers={"Accept": "text/html, */*;q=0.1"})
    try:
        with contextlib.closing(urllib.request.urlopen(request, timeout=_PATIENCE_S)) as answer:
            content: bytes = answer.read(limit + 1)
    except (OSError, ValueError) as error:
        raise SettingError(f"pip's index does not answer as it should: {error}") from error
    if len(content) > limit:
        raise SettingError(f"pip's index sends more than {limit:,} bytes")
    return content


class _Links(html.parser.HTMLParser):
    """The targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps what a link leads to."""
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]
