"""The files of a model are found, and what else its code is in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.planner.model.functions import loaded_sources, sources
from autopar.planner.model.model_file import import_file

MODEL = """
import json

import torch
from helping_layers import scaled

from neighbour import WIDTH
import helping_losses as losses


class Own(torch.nn.Module):
    pass
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model file with a neighbour, and with a package of its author's that lies elsewhere."""
    files = {
        "project/model_of_sources.py": MODEL,
        "project/neighbour.py": "WIDTH = 4",
        "elsewhere/helping_layers.py": "def scaled(x): return x",
        "elsewhere/helping_losses.py": "STEP = 0",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    yield tmp_path / "project/model_of_sources.py"
    for name in files:
        sys.modules.pop(Path(name).stem, None)


def test_the_files_of_a_model_lie_in_its_folder(model: Path) -> None:
    assert [one.name for one in sources(model)] == ["model_of_sources.py", "neighbour.py"]


def test_code_of_a_model_is_where_its_author_has_put_it_and_in_no_library(model: Path) -> None:
    import_file(model)
    found = {one.__name__ for one in loaded_sources(model)}
    assert found == {"model_of_sources", "neighbour", "helping_layers", "helping_losses"}


def test_a_class_of_the_model_tells_where_its_code_is(tmp_path: Path) -> None:
    (path := tmp_path / "model_without_classes.py").write_text("", encoding="utf-8")

    class Part:
        pass

    assert [one.__name__ for one in loaded_sources(path, [Part, object, Path])] == [__name__]


def test_a_file_that_is_not_there_has_no_code(tmp_path: Path) -> None:
    assert loaded_sources(tmp_path / "model.py") == []
