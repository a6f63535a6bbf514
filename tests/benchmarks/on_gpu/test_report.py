"""Rows are on disk as soon as they are known, and the page has a table for each sort."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.on_gpu.report import Report, Row


def test_every_row_is_written_at_once(tmp_path: Path) -> None:
    report = Report(page=tmp_path / "page.md", place="a GPU")
    report.add(Row(table="speed", cells={"op": "a|b", "ms": 1.23456}))
    report.add(Row(table="speed", cells={"op": "c", "error": "two\nlines"}))
    lines = [json.loads(line) for line in (tmp_path / "page.jsonl").read_text().splitlines()]
    assert [line["op"] for line in lines] == ["a|b", "c"]
    page = (tmp_path / "page.md").read_text()
    assert "| op | ms | error |" in page
    assert "| a\\|b | 1.235 |  |" in page
    assert "| c |  | two ⏎ lines |" in page
