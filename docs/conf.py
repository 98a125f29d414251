"""Sphinx settings.

Build with: pip install -e ".[docs]" && sphinx-build -W -b html docs docs/_build
"""

import html
import sys
from pathlib import Path

import latex2mathml.converter
from docutils import nodes
from sphinx.util.images import get_image_size

import gradcomp_jax

sys.path.insert(0, str(Path(__file__).parent))

project = "gradcomp_jax"
repository = "https://github.com/gradcomp-jax/gradcomp_jax/"
author = "The gradcomp_jax authors"
copyright = f"2026, {author}"
release = version = gradcomp_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "notebooks",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gradcomp_jax {release}"
html_theme_options = {
    "source_repository": repository,
    "source_branch": "main",
    "source_directory": "docs/",
}
notebooks_url = f"{repository}blob/main/colabs"
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Browsers render MathML by themselves, so formulas need no network.
html_math_renderer = "mathml"

# Pages link to each other's headings.
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_block", "dollarmath"]

# The signature shows the types; the text shows shapes, dtypes and units.
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are listed once, in the class, and not again as members


def mathml(latex, display):
    """Returns a formula as MathML, with its source for screen readers.

    Raises:
        ValueError: for a command that the converter does not know.
    """
    found = latex2mathml.converter.convert(latex, display=display)
    if "\\" in found:
        raise ValueError(f"latex2mathml does not know a command of {latex!r}, and leaves {found!r}")
    return found.replace("<math ", f'<math alttext="{html.escape(latex)}" ', 1)


def visit_math(writer, node):
    """Writes a formula within a line."""
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_math_block(writer, node):
    """Writes a formula on lines of its own, in a box that scrolls where the page is narrow."""
    writer.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def link_pictures(app, doctree):
    """Gives each picture its own width as a limit. Sphinx then links it to its file, where small letters can be read."""
    for picture in doctree.findall(nodes.image):
        size = get_image_size(app.srcdir / picture["uri"])
        if size is not None and not isinstance(picture.parent, nodes.reference):
            picture["width"] = f"{size[0]}px"


def setup(app):
    """Registers the renderer of formulas, and links pictures."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("doctree-read", link_pictures)
