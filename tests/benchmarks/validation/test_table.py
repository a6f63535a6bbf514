"""Reading tables of published runs: every fault is told, with its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.planner.errors import InputError
from benchmarks.validation.skip import NEEDED, TIMES
from benchmarks.validation.table import COLUMNS, read_table
from tests.benchmarks.validation.rows import a_row, table_text


def refusal(folder: Path, text: str | bytes) -> InputError:
    path = folder / "runs.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        read_table(path)
    return caught.value


def documented() -> Iterator[tuple[str, str]]:
    """Yield each column that docs/accuracy.md lists, and whether it is needed."""
    page = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    lines = page.partition("## The table of runs")[2].splitlines()
    for line in (line for line in lines if line.startswith("| `")):
        names, _, needed = (cell.strip() for cell in line.strip("|").split("|"))
        yield from ((name.strip("` "), needed) for name in names.split(","))


def test_the_documented_columns_are_those_that_are_read() -> None:
    columns = [name for name, _ in documented()]
    assert sorted(columns) == sorted(COLUMNS)


def test_the_columns_that_are_documented_as_needed_are() -> None:
    needed = {name for name, word in documented() if word == "yes"}
    assert needed == {*NEEDED, "model_family"}  # a family is needed by being one that is known
    assert {name for name, word in documented() if word == "one of them"} == set(TIMES)


def test_cells_become_counts_figures_and_flags(tmp_path: Path) -> None:
    row = a_row(tmp_path, layers="12", mfu="0.41", sp="True", experts="")
    assert (row.layers, row.mfu, row.sp, row.experts) == (12, 0.41, True, None)
    assert row.where == "runs.csv:2"


@pytest.mark.parametrize(
    ("column", "cell", "told"),
    [
        ("iteration_time_s", "0", "a positive, finite number"),
        ("iteration_time_s", "-1.5", "a positive, finite number"),
        ("iteration_time_s", "inf", "a positive, finite number"),
        ("iteration_time_s", "nan", "a positive, finite number"),
        ("iteration_time_s", "50 ms", "a number"),
        ("layers", "0", "a whole number of at least 1"),
        ("layers", "2.5", "a whole number of at least 1"),
        ("gpus", "many", "a number"),
        ("sp", "maybe", "True, False or nothing"),
    ],
)
def test_a_bad_cell_is_told_with_line_column_and_need(
    tmp_path: Path, column: str, cell: str, told: str
) -> None:
    found = refusal(tmp_path, table_text({}, {column: cell})).found
    assert f"line 3: {column} is {cell!r}" in found
    assert told in found


def test_all_faults_are_told_together(tmp_path: Path) -> None:
    error = refusal(tmp_path, table_text({"tp": "4"}, {"layers": "x"}, {"gpus": "-4"}))
    assert [f"line {line}" in error.found for line in (2, 3, 4)] == [True, True, True]
    assert "runs.csv" in error.where
