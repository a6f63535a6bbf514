"""A model file and its arguments become functions that are ready to call."""

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from autopar.planner.errors import InputError
from autopar.planner.model.model_file import ModelFile, import_file, load_model_file
from autopar.planner.trace import trace


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("net", None)


SOURCE = """
def build_model(size: str = "tiny", depth: int = 2, rate: float | None = 0.1, bias: bool = True):
    return size, depth, rate, bias

def example_batch(batch_size, seq: int = 8):
    return batch_size, seq
"""


def loaded(folder: Path, source: str, *arguments: str, factory: str = "") -> ModelFile:
    path = folder / "net.py"
    path.write_text(dedent(source))
    return load_model_file(f"{path}:{factory}" if factory else str(path), arguments)


def test_without_arguments_the_defaults_hold(tmp_path: Path) -> None:
    model_file = loaded(tmp_path, SOURCE)
    assert model_file.build_model() == ("tiny", 2, 0.1, True)
    assert model_file.example_batch(7) == (7, 8)
    assert model_file.name == "net"


def test_each_function_gets_the_arguments_that_it_takes(tmp_path: Path) -> None:
    model_file = loaded(tmp_path, SOURCE, "size=big", "seq=16")
    assert model_file.build_model() == ("big", 2, 0.1, True)
    assert model_file.example_batch(7) == (7, 16)
    assert model_file.name == "net (size=big, seq=16)"


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        ("str", "3", "3"),
        ("str", "none", "none"),
        ("str | None", "none", None),
        ("int", "3", 3),
        ("int | None", "none", None),
        ("Optional[int]", "None", None),
        ("Optional[int]", "5", 5),
        ("'int'", "3", 3),
        ("float", "1e-3", 0.001),
        ("float", "3", 3),
        ("bool", "true", True),
        ("bool", "False", False),
        ("tuple", "(1, 2)", (1, 2)),
        ("object", "a=b", "a=b"),
    ],
)
def test_a_value_is_read_by_the_annotation(
    tmp_path: Path, annotation: str, text: str, value: Any
) -> None:
    source = f"""
    from typing import Optional

    def build_model(*, option: {annotation} = ...):
        return option

    def example_batch(batch_size): ...
    """
    built = loaded(tmp_path, source, f"option={text}").build_model()
    assert built == value
    assert type(built) is type(value)


def test_another_factory_may_be_named(tmp_path: Path) -> None:
    source = SOURCE + "def small(): return 'small'\n"
    model_file = loaded(tmp_path, source, factory="small")
    assert (model_file.factory, model_file.build_model()) == ("small", "small")


def test_optional_functions_are_there_when_the_file_defines_them(tmp_path: Path) -> None:
    assert loaded(tmp_path, SOURCE).loss is None
    model_file = loaded(tmp_path, SOURCE + "def loss(outputs, batch): return outputs + batch\n")
    assert model_file.loss is not None
    assert model_file.loss(1, 2) == 3
    assert model_file.build_dataset is None


def test_a_model_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_net.py").write_text("SIZE = 5\n")
    source = "from neighbour_of_net import SIZE\n" + SOURCE + "def size(): return SIZE\n"
    assert loaded(tmp_path, source, factory="size").build_model() == 5


def test_a_dataclass_with_postponed_annotations_works(tmp_path: Path) -> None:
    source = """
    from __future__ import annotations
    from dataclasses import dataclass

    @dataclass
    class Config:
        width: int = 3

    def build_model(depth: int = 1):
        return Config().width * depth

    def example_batch(batch_size): ...
    """
    assert loaded(tmp_path, source, "depth=2").build_model() == 6


def test_what_runs_as_a_script_alone_does_not_run(tmp_path: Path) -> None:
    loaded(tmp_path, SOURCE + 'if __name__ == "__main__":\n    raise SystemExit(1)\n')


def test_a_failed_import_leaves_no_module_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"importing net\.py failed: ZeroDivisionError"):
        loaded(tmp_path, "1 / 0")
    assert "net" not in sys.modules


def test_a_fault_names_the_line_in_the_model_file(tmp_path: Path) -> None:
    source = """
    def inner():
        raise ValueError("no such size")

    def build_model():
        return inner()

    def example_batch(batch_size): ...
    """
    with pytest.raises(InputError, match="no such size") as raised:
        loaded(tmp_path, source).build_model()
    assert raised.value.where == f"{tmp_path / 'net.py'}:3"


def test_an_interrupt_is_no_fault_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        loaded(tmp_path, "raise KeyboardInterrupt")


COMPILED = """
import torch
from torch import nn

@torch.jit.script
def clamped(x: torch.Tensor, most: float):
    return (x / most).tanh() * most

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x):
        return clamped(self.map(x), 5.0).square().mean()

def build_model():
    return Model()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 4)}
"""


def test_functions_that_a_model_file_compiles_are_traced_as_python(tmp_path: Path) -> None:
    plain = torch.jit.script
    (tmp_path / "compiled.py").write_text(COMPILED, encoding="utf-8")
    graph = trace(load_model_file(str(tmp_path / "compiled.py")))
    assert torch.jit.script is plain
    assert "aten.tanh.default" in {op.target for op in graph.ops}
    assert graph.fixed_batch is None


def test_a_file_that_defines_an_op_is_imported_again_only_if_its_text_has_changed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.py"
    text = dedent("""
        import torch

        @torch.library.custom_op("imported_once::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return 2 * x
    """)
    path.write_text(text)
    first = import_file(path)
    assert import_file(path) is first
    assert first.twice(torch.ones(1)).item() == 2
    path.write_text(text.replace("2 * x", "x + x + x"))
    second = import_file(path)
    assert second.twice(torch.ones(1)).item() == 3
    assert import_file(path) is second
