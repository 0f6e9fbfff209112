"""The site of the documentation: `make docs` builds it in docs/_build/html, with warnings as errors.

Pages are those of this folder. Files that people look for beside the code (PAGES) are in the site by reference. Links between
all of them are written as the repository has them; `follow` turns those that leave this folder into links between pages.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

project = "lightning_ptm"
author = project
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
smartquotes = False  # errors are searched for by their text
html_theme = "furo"
html_title = f"{project} {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # as the sites that show Markdown make them

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/gpu.md": "first_gpu.md",
}
"""Files of the repository and the pages that include them."""

LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def follow(text: str, folder: Path) -> str:
    """The text of a file in `folder` with its links as this folder has them."""

    def followed(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[1]))
        name = target.relative_to(ROOT).as_posix()
        return f"]({PAGES.get(name) or os.path.relpath(target, DOCS)}"

    return LINK.sub(followed, text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""

    def page(app: Sphinx, name: str, content: list[str]) -> None:
        content[0] = follow(content[0], DOCS)
        if name == "reference":
            import reference_page  # beside this file, which Sphinx does not put on the path

            content[0] = f"{content[0]}\n{reference_page.page()}"

    def included(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
        content[0] = follow(content[0], (DOCS / path).parent)

    app.connect("source-read", page)
    app.connect("include-read", included)
