"""A Sphinx extension: the directive ``notebooks``, a gallery with a picture of each notebook of ``colabs``.

Each line of the directive is ``name: caption``, or ``name number: caption`` for another picture than the first. Pictures are
taken from the outputs that the notebooks store, at each build; none is kept beside them.
"""

import base64
import json
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[1] / "colabs"
_LINE = re.compile(r"(\w+)(?: (\d+))?: (.+)")


def read(name: str) -> tuple[str, list[bytes]]:
    """Returns the title of a notebook, and the pictures in its outputs."""
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    title = re.match(r"# (.*)", "".join(cells[0]["source"]))[1].replace("`", "")
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    # A picture may be stored as one string, or as lines.
    return title, [base64.b64decode("".join(data["image/png"])) for data in outputs if "image/png" in data]


class Notebooks(SphinxDirective):
    """Shows a picture of each notebook, its title with a link, and a caption."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Returns the gallery. The pictures lie beside what Sphinx keeps between builds, which copies them into the site."""
        gallery = nodes.container(classes=["notebooks"])
        folder = Path(self.env.doctreedir) / "notebooks"
        folder.mkdir(parents=True, exist_ok=True)
        page = Path(self.env.doc2path(self.env.docname)).parent
        for line in self.content:
            if (found := _LINE.fullmatch(line)) is None:
                raise self.error(f"a line is 'name: caption' or 'name number: caption', not {line!r}")
            name, number, caption = found[1], int(found[2] or 1), found[3]
            title, pictures = read(name)
            if number > len(pictures):
                raise self.error(f"{name} has {len(pictures)} pictures, so none with number {number}")
            self.env.note_dependency(str(FOLDER / f"{name}.ipynb"))
            (folder / f"notebook-{name}.png").write_bytes(pictures[number - 1])
            link = f"{self.config.notebooks_url}/{name}.ipynb"
            uri = Path(os.path.relpath(folder / f"notebook-{name}.png", page)).as_posix()
            picture = nodes.reference("", "", nodes.image(uri=uri, alt=f"A picture of {title}"), refuri=link)
            text, messages = self.parse_inline(caption)
            head = nodes.reference("", title, refuri=link)
            gallery += nodes.figure(
                "", picture, nodes.caption("", "", nodes.strong("", "", head), nodes.Text(" "), *text)
            )
            gallery += messages
        return [gallery]


def setup(app):
    """Registers the directive."""
    app.add_config_value("notebooks_url", "", "env")
    app.add_directive("notebooks", Notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
