"""
Settings of Sphinx, which makes the pages and the reference of all public names. The command is in *Contributing*.

A build needs no network, and fails at a link that leads nowhere.
"""

from pathlib import Path
from typing import Any

project = "elasticlib"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "elasticlib"
# A name in single backticks is a link to its entry, if it has one.
default_role = "py:obj"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
myst_heading_anchors = 3


def begin_with_readme(app: Any, page: str, content: list[str]) -> None:
    """Put the README before the table of contents of the first page."""
    if page == "index":
        readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
        content[0] = readme.replace("(elasticlib/docs/", "(").replace("(notebooks/", "(../../notebooks/") + content[0]


def setup(app: Any) -> None:
    """Connect with Sphinx, which calls this."""
    app.connect("source-read", begin_with_readme)
