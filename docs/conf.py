"""The site that `make docs` builds.

It has the README, the pages of this folder, and the public API from its docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from torchgpipe.__version__ import __version__

project = "torchgpipe for today's PyTorch"
author = "its authors"
release = __version__
html_title = project
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]  # it makes room for wide tables
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write code between single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
html_copy_source = False
html_show_copyright = False
# Types in signatures that have no link: a build without a network does not have the inventories of
# other projects, and no page shows some types of this library.
nitpick_ignore_regex = [("py:.*", r"(?!torchgpipe).*"), ("py:class", r"torchgpipe\..*\..*")]

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the README before the index, and name files that are no pages of this site.

    A link to such a file would lead nowhere. A link to the README leads to the index.
    """
    if name == "index":
        app.env.note_dependency(str(README))
        readme = README.read_text(encoding="utf-8")
        readme = re.sub(r"\]\((?!https?:|docs/|#)", "](../", readme)
        readme = readme.replace("](docs/", "](")
        source[0] = readme + source[0]

    def linked(link: re.Match[str]) -> str:
        path = (DOCS / link[2]).resolve()
        if path == README:
            return f"[{link[1]}](index.md{link[3] or ''})"
        if DOCS in path.parents or not path.exists():
            return link[0]
        name = f"`{path.relative_to(DOCS.parent)}`"
        return name if link[1] == name.strip("`") else f"{link[1]} ({name})"

    source[0] = LINK.sub(linked, source[0])


def mark_code(app: Sphinx, *event: Any) -> None:
    """Mark the indented examples of a docstring as code. Its sections are indented, too."""
    lines: list[str] = event[-1]  # after the kind, the name and the object that is documented
    for at in range(len(lines) - 1, 1, -1):
        text, blank = lines[at - 2 : at]
        follows_text = text[:1].strip() and not SECTION.match(text)
        if lines[at].startswith("    ") and not blank and follows_text:
            lines[at:at] = ["::", ""]


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", mark_code, priority=1)
