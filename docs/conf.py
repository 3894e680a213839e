"""The site that `make docs` builds: the README, these pages, and the public API from its docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from torchgpipe.__version__ import __version__

project, author, release = "torchgpipe for today's PyTorch", "its authors", __version__
html_title = project
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]  # room for wide tables
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write code between single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
html_copy_source = html_show_copyright = False
# Types in signatures: those of other projects, whose inventories a build without a network does not have, and our own
# that no page shows.
nitpick_ignore_regex = [("py:.*", r"(?!torchgpipe).*"), ("py:class", r"torchgpipe\..*\..*")]

DOCS = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the README before the index, and name files that are no pages of this site, instead of linking to them."""
    if name == "index":
        readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
        source[0] = (
            re.sub(r"\]\((?!https?:|docs/)", "](../", readme).replace("](docs/", "](") + source[0]
        )

    def linked(link: re.Match[str]) -> str:
        path = (DOCS / link[2]).resolve()
        return (
            f"{link[1]} (`{path.relative_to(DOCS.parent)}`)"
            if DOCS not in path.parents and path.exists()
            else link[0]
        )

    source[0] = LINK.sub(linked, source[0])


def mark_code(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Mark the indented examples of a docstring as code. Its sections are indented, too."""
    for at in range(len(lines) - 1, 1, -1):
        text, blank = lines[at - 2 : at]
        if (
            lines[at].startswith("    ")
            and not blank
            and text[:1].strip()
            and not SECTION.match(text)
        ):
            lines[at:at] = ["::", ""]


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", mark_code, priority=1)
