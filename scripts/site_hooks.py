"""The pages of the site besides those of docs/: README is its front page, and each example is a page of the gallery.

Pages link to files of the repository, such as ``../examples/digits.py``, which works where the repository is shown. The
hooks turn these links into links to the pages.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import gallery_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
MARKDOWN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
}
EXAMPLES = {f"examples/{name}.py": f"examples/{name}.md" for name in gallery_pages.TITLES}
PAGES = {**MARKDOWN, **EXAMPLES, "LICENSE": "license.md"}
"""File of the repository -> page of the site; those of docs/ are pages under their own names."""

SIDE_BY_SIDE = '<div class="grid" markdown>'
"""Begins two blocks of code that need the width of the page."""

FILES = {page: file for file, page in PAGES.items()}
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):(?=<code>)")
"""The role in front of a name in a docstring, which is no Markdown."""
LITERAL = re.compile(r"<p>::</p>|(?<=:):(?=</p>)")
"""The marks of code in a docstring; its indentation is enough for Markdown."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def rewrite_links(markdown: str, page: str) -> str:
    """The text of ``page``, with links to pages of the site in place of links to files of the repository."""
    source = FILES.get(page, DOCS + page)

    def replace(match: re.Match[str]) -> str:
        file = os.path.normpath(os.path.join(os.path.dirname(source), match[2]))
        if file not in PAGES and not file.startswith(DOCS):
            return match[0]  # MkDocs will say that there is no such page
        target = PAGES.get(file, file.removeprefix(DOCS))
        return match[1] + os.path.relpath(target, os.path.dirname(page) or ".") + match[3]

    return LINK.sub(replace, markdown)


def page_of(file: str) -> str:
    """The Markdown of the page for ``file``, a key of PAGES."""
    text = (ROOT / file).read_text()
    if file == "README.md":
        return f"---\nhide: [navigation]\n---\n\n{text}"
    if file in MARKDOWN:
        return text
    if file in EXAMPLES:
        return gallery_pages.page(Path(file).stem)
    return f"# License\n\nFor everyone who uses or changes hvd-cluster.\n\n```text\n{text}```\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every example gets a place in the gallery, under its topic."""
    for section in config.nav or []:
        if "Gallery" in section:
            section["Gallery"] += [
                {topic: [EXAMPLES[f"examples/{name}.py"] for name in titles]}
                for topic, titles in gallery_pages.TOPICS.items()
            ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that are no files of docs/."""
    from mkdocs.structure.files import File

    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=page_of(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Before MkDocs checks the links of the page."""
    if SIDE_BY_SIDE in markdown:
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri == "gallery/README.md":
        page.meta["hide"] = ["toc"]
    return rewrite_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Without the marks of docstrings, in the pages that come from them."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    return LITERAL.sub("", ROLE.sub("", html))
