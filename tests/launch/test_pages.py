"""The pages of docs/launch and their files belong together."""

from __future__ import annotations

import re

from tests.launch.launch_files import FILES, PAGES

LINK = re.compile(r"\]\((files/[^)]+)\)")


def test_every_file_is_on_a_page() -> None:
    linked = {name for page in PAGES.glob("*.md") for name in LINK.findall(page.read_text())}
    # Docker finds this one by its name.
    there = [path for path in FILES.rglob("*") if path.is_file() and path.suffix != ".dockerignore"]
    assert sorted(linked) == sorted(f"files/{path.relative_to(FILES)}" for path in there)
    assert len(linked) > 10


def test_every_page_is_in_the_list() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (PAGES / "README.md").read_text())
    assert {page.name for page in PAGES.glob("*.md")} == {*listed, "README.md"}
