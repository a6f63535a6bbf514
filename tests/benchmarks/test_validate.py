"""`python -m benchmarks.validate` as a person runs it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.validate import app
from tests.benchmarks.validation.rows import table_text

run = CliRunner().invoke


def test_it_tells_errors_of_each_table_and_in_total(tmp_path: Path) -> None:
    table, other = tmp_path / "one.csv", tmp_path / "two.csv"
    table.write_text(table_text({}, {"dtype": "fp8"}), encoding="utf-8")
    other.write_text(table_text({"global_batch": "16"}), encoding="utf-8")
    result = run(app, [str(table), str(other)])
    assert result.exit_code == 0, result.output
    for text in ("one.csv", "two.csv", "all tables", "precision is not modelled"):
        assert text in result.output


def test_json_and_csv_hold_the_figures(tmp_path: Path) -> None:
    table, output = tmp_path / "runs.csv", tmp_path / "out.csv"
    table.write_text(table_text({}), encoding="utf-8")
    result = run(app, [str(table), "--json", "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["total"]["predicted"] == 1
    (line,) = csv.DictReader(output.read_text(encoding="utf-8").splitlines())
    assert line["measured_seconds"] == "0.05"
    assert float(line["predicted_seconds"]) > 0


def test_a_bad_table_is_refused_with_its_line(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(table_text({"tp": "4"}), encoding="utf-8")
    result = run(app, [str(table)])
    assert result.exit_code != 0
    assert "line 2" in str(result.exception)


def test_what_it_did_not_write_is_not_replaced(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(table_text({}), encoding="utf-8")
    before = table.read_text(encoding="utf-8")
    result = run(app, [str(table), "-o", str(table)])
    assert "is in the way" in str(result.exception)
    assert table.read_text(encoding="utf-8") == before


def test_what_is_no_table_is_told(tmp_path: Path) -> None:
    page = tmp_path / "model.py"
    page.write_text("import torch", encoding="utf-8")
    for path, telling in ((page, "no table of published runs"), (tmp_path / "no.csv", "cannot")):
        assert telling in str(run(app, [str(path)]).exception)
