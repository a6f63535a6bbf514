"""The house stays small enough to learn: few files, short ones, one meaning for each class name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("autopar", "planner", "codegen", "runtime")
MOST_FILES = 341
MOST_LINES = 400  # of a file
MOST_IMPORTS = 0.106  # of the lines of code: neither empty, nor comments, nor docstrings


@cache
def files() -> Sequence[Path]:
    """Return the files of the product; `autopar` has links to the other folders."""
    return tuple(path for room in PRODUCT for path in sorted(_below(ROOT / room)))


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)
        elif path.suffix == ".py":
            yield path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def import_lines(path: Path) -> int:
    imports = (one for one in tree_of(path).body if isinstance(one, ast.Import | ast.ImportFrom))
    return sum(map(length, imports))


def code_lines(path: Path) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    told = set(docstring_lines(tree_of(path)))
    code = (line.strip() for number, line in enumerate(lines, start=1) if number not in told)
    return sum(bool(line) and not line.startswith("#") for line in code)


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            yield from range(docstring.lineno, (docstring.end_lineno or 0) + 1)


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_there_are_few_files() -> None:
    assert len(files()) <= MOST_FILES


def test_no_file_is_long() -> None:
    assert {str(one): line_count(one) for one in files() if line_count(one) > MOST_LINES} == {}


def test_few_lines_are_imports() -> None:
    assert sum(map(import_lines, files())) <= MOST_IMPORTS * sum(map(code_lines, files()))


def test_no_class_name_occurs_twice() -> None:
    nodes = (node for path in files() for node in ast.walk(tree_of(path)))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    twice = {name for name, count in counts.items() if count > 1}
    assert twice == {
        "Plan"
    }  # a decision of the planner; and what `autopar.plan` returns, around it


ASKED_BY_COLUMNS = (
    r"\b(Zero\.[A-Z]{2,}|Recompute\.(?:SELECTIVE|FULL)|Precision\.FP16|Backend\.GLOO)\b"
)
MAY_NAME = {  # their rows, and those that choose one
    "planner/costs/prediction.py",
    "planner/precision.py",
    "planner/cluster/cluster.py",
    "planner/plan/search/space.py",
    "planner/profile/net.py",
}


def test_facts_of_modes_are_columns_of_their_rows() -> None:
    naming = {
        str(path.relative_to(ROOT))
        for path in files()
        if re.search(ASKED_BY_COLUMNS, path.read_text(encoding="utf-8"))
    }
    assert naming <= MAY_NAME
