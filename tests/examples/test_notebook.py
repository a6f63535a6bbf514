"""The notebook prints what stands below its cells, and the page on Python shows the same."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RENDER = runpy.run_path(str(ROOT / "docs" / "render_readme.py"))


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow
def test_the_notebook_prints_what_it_shows() -> None:
    notebook = json.loads(RENDER["NOTEBOOK"].read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(text for one in cell["outputs"] for text in one["text"]) for cell in cells]
    assert RENDER["run_cells"]([RENDER["source_of"](cell) for cell in cells]) == shown


def test_the_page_on_python_shows_the_notebook() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert RENDER["SESSION"].sub(RENDER["_session"], page) == page
