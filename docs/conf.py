"""Configure Sphinx for the site that `make docs` builds.

The site has the README and the pages of this folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from torchgpipe.__version__ import __version__

project = "torchgpipe for today's PyTorch"
author = "its authors"
release = __version__
html_title = project
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]  # it makes room for wide tables
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_use_index = False
html_copy_source = False
html_show_copyright = False

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Change the source of a page before Sphinx reads it.

    The text of the index begins with the README's text. On all pages, a link to the README becomes
    a link to the index. A link to a file that is no page of this site would lead nowhere, so the
    file's name takes its place.
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


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
