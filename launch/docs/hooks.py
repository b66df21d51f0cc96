"""mkdocs' hooks: what the pages link to outside of ``docs/`` is on the site too, or is named there without a link."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
ASSETS = ("site.css", "iframe-worker.js")
_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are at the top of the repository, and what they load."""
    for name, uri in PAGES.items():
        if uri not in files.src_uris:
            files.append(File.generated(config, uri, content=of_the_site((ROOT / name).read_text(), ROOT)))
    for name in ASSETS:
        files.append(File.generated(config, name, content=(ROOT / "launch" / "docs" / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links out of ``docs/`` to the pages of ``on_files``."""
    at_the_top = page.file.src_uri in PAGES.values() and page.file.generated_by is not None
    return markdown if at_the_top else of_the_site(markdown, ROOT / "docs")


def of_the_site(markdown: str, folder: Path) -> str:
    """A page of ``folder`` with its links as the site has them; a file that is not on the site loses its link."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return f"[{text}]({path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        name = path.relative_to(ROOT).as_posix()
        there = name in PAGES and not (name == "README.md" and anchor)  # in whose place is another page
        return f"[{text}]({PAGES[name]}{anchor})" if there else text

    return _LINK.sub(link, markdown)
