"""A metadata hook of hatchling: links of the README lead to the repository, at the tag, as PyPI shows no other file of it."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)]+)\)")


class Readme(MetadataHookInterface):
    """Sets the field ``readme``."""

    def update(self, metadata: dict) -> None:
        """Reads the README and the version, and replaces relative links."""
        root = Path(self.root)
        source = (root / "gradcomp_jax" / "__init__.py").read_text(encoding="utf-8")
        tag = "v" + re.search(r'^__version__ = "(.*)"', source, re.MULTILINE)[1]
        repository = metadata["urls"]["Repository"]

        def absolute(link: re.Match) -> str:
            picture, text, target = link.groups()
            return f"{picture}{text}({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

        text = LINK.sub(absolute, (root / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
