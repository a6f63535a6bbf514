"""What is printed is formatted and clean as it comes out."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.split import split_graph
from autopar.codegen.script.render import script_imports
from tests.cells import cells
from tests.codegen.forward.running import zoo_modules
from tests.codegen.forward.test_ranks import MODELS, random_split
from tests.planner.subjects import ZOO_MODELS, zoo_graph

CONFIG = Path(__file__).parents[3] / "pyproject.toml"


def script(opened: OpenedSource) -> str:
    """Return all sources as one file, the user's classes imported."""
    every = (*opened.classes, *(stage.cls for stage in opened.stages))
    user = [f"from {one.module} import {one.qualname}" for one in sorted(set(opened.imported))]
    sources = list(dict.fromkeys(cls.source for cls in every))  # stages may share one
    sources += [source for source in (opened.loss, opened.valid_targets) if source is not None]
    body = "\n\n".join(sources)
    head = "\n".join(['"""Printed."""\n', script_imports(body), *user])
    return head + "\n\n\n" + body


def complaints(source: str) -> str:
    """Return what ruff says of a file, and how it would format it otherwise."""
    options = ["--config", str(CONFIG), "--stdin-filename", "script.py", "-"]
    ignored = ["--extend-ignore", "I001,N812,A002,ARG"]  # the script sorts its imports itself
    check = [sys.executable, "-m", "ruff", "check", "-q", "--output-format", "concise", *ignored]
    style = [sys.executable, "-m", "ruff", "format", "--diff", "-q"]
    found = ""
    for command in (check, style):
        done = subprocess.run(
            [*command, *options], input=source, capture_output=True, text=True, check=False
        )
        found += done.stdout + done.stderr
    return found


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_opened_modules_are_printed_as_ruff_would_format_them(name: str) -> None:
    graph = zoo_graph(name)
    split = split_graph(graph, zoo_modules(name))
    opened = open_split(split, [len(split.layers.layers)], opened=sorted(graph.calls))
    assert complaints(script(opened)) == ""


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_stages_are_printed_as_ruff_would_format_them(name: str) -> None:
    split = split_graph(zoo_graph(name), zoo_modules(name))
    count = len(split.layers.layers)
    opened = open_split(split, [1] * count)
    assert complaints(script(opened)) == ""


ODD = list(product(MODELS, range(2)))


@pytest.mark.parametrize(("name", "seed"), cells(ODD, ODD[::3]))
def test_odd_splits_are_printed_as_ruff_would_format_them(name: str, seed: int) -> None:
    split = random_split(name, seed=seed, ranks=2)
    opened = open_split(split, [len(split.layers.layers)])
    assert complaints(script(opened)) == ""
