"""Sphinx settings.

Build with: pip install -e ".[docs]" && sphinx-build -W -b html docs docs/_build
"""

from importlib import metadata

project = "gradcomp_jax"
author = "The gradcomp_jax authors"
copyright = f"2026, {author}"
release = metadata.version("gradcomp-jax")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"

# Pages link to each other's headings.
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]

# The signature shows the types; the text shows shapes, dtypes and units.
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are listed once, in the class, and not again as members
