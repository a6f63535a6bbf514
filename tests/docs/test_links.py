"""Links of pages lead to files and headings that are there, and so do names of our own files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|^ {4}.*?$|`[^`]*`", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def dead_links(page: Path) -> Iterator[str]:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    assert list(dead_links(page)) == []


DESIGN = [ROOT / "ARCHITECTURE.md", *(ROOT / "docs" / "decisions").glob("*.md")]
FOLDERS = ("autopar", "planner", "codegen", "runtime", "models_zoo", "benchmarks", "tests")
_FILE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|toml)|[a-z_0-9]+\.py)`")


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.name)
def test_files_that_the_design_names_exist(page: Path) -> None:
    ours = [f"/{one.relative_to(ROOT)}" for folder in FOLDERS for one in _sources(ROOT / folder)]
    named = _FILE.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if not any(one.endswith(f"/{name}") for one in ours)] == []


def _sources(folder: Path) -> Iterator[Path]:
    return (one for end in ("py", "toml") for one in folder.rglob(f"*.{end}"))
