"""The house stays small enough to learn: few files, short ones, one meaning for each class name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("autopar", "planner", "codegen", "runtime")
MOST_FILES = 340
MOST_LINES = 400  # of a file
MOST_IMPORTS = 0.10  # of the lines that are not empty


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
    return sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in imports)


def test_there_are_few_files() -> None:
    assert len(files()) <= MOST_FILES


def test_no_file_is_long() -> None:
    assert {str(one): line_count(one) for one in files() if line_count(one) > MOST_LINES} == {}


def test_few_lines_are_imports() -> None:
    texts = [path.read_text(encoding="utf-8").splitlines() for path in files()]
    lines = sum(bool(line.strip()) for text in texts for line in text)
    assert sum(map(import_lines, files())) <= MOST_IMPORTS * lines


def test_no_class_name_occurs_twice() -> None:
    nodes = (node for path in files() for node in ast.walk(tree_of(path)))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    twice = {name for name, count in counts.items() if count > 1}
    assert twice == {
        "Plan"
    }  # a decision of the planner; and what `autopar.plan` returns, around it
