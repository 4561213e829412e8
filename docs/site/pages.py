"""A mkdocs hook: pages of the site that lie outside docs, and links between them and docs.

The README is the first page. Links work in a checkout and on the site: a link to a page is
rewritten to its place on the site, and a link to a file that is not on the site becomes its path.
GitHub's Markdown is changed where Python-Markdown reads it differently.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "bench/index.md",
    "bench/results/README.md": "bench/results.md",
}
"""Pages outside docs, by their path in a checkout, each with its place on the site."""
NAMED_FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)
"""A fence with a name behind its language, by which tests find it; the site knows none."""
BLOCK = re.compile(r"(^(?![-|\s]|\d+\. |#).+\n)(?=- |\d+\. |\|)", re.MULTILINE)
"""A line of text right above a list or table, between which Python-Markdown wants an empty line."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs."""
    root = Path(config.config_file_path).parent
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(root / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links lead to places on the site, and write Markdown as mkdocs reads it."""
    here = page.file.src_uri
    places = {place: source for source, place in PAGES.items()}
    source = places.get(here, f"docs/{here}")

    def linked(match: re.Match[str]) -> str:
        image, text, path, anchor = match.groups(default="")
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = PAGES.get(wanted, wanted.removeprefix("docs/"))
        if place == wanted:  # neither in docs nor one of the pages
            return text if text.startswith("`") else f"{text} (`{wanted}`)"
        return f"{image}[{text}]({posixpath.relpath(place, posixpath.dirname(here))}{anchor})"

    return LINK.sub(linked, BLOCK.sub(r"\1\n", NAMED_FENCE.sub(r"\1", markdown)))
