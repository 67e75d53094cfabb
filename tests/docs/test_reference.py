"""The pages that are written from the code are as the code is; and the site's navigation has every page."""

from __future__ import annotations

import re

from bench.pages import DOCS, ROOT
from bench.reference import FOLDER, command_line, interface


def test_the_reference_is_that_of_the_code() -> None:
    """After a change: `python -m bench.reference`."""
    assert (FOLDER / "cli.md").read_text(encoding="utf-8") == command_line()
    assert (FOLDER / "api.md").read_text(encoding="utf-8") == interface()


def test_the_navigation_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert there == {*re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE)}


def test_links_lead_somewhere() -> None:
    """Also to headings, by the names that GitHub gives them."""
    headings = {page: _headings(page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")}
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *headings]:
        for target, heading in re.findall(
            r"\]\((?!https?:)([\w./-]*)(?:#([\w-]*))?\)", page.read_text(encoding="utf-8")
        ):
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not heading or heading in headings[there], f"{page.name}: {target}#{heading}"


def _headings(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "]", title)).lower().replace(" ", "-") for title in titles}
