"""Whatever names and arguments a person has, they stay names and arguments."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen import emit as emitting
from autopar.codegen.emit import emit
from autopar.codegen.script.render import UnsafeScriptError
from autopar.planner.costs.prediction import Zero
from autopar.planner.errors import AutoparError
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.files.document import parse_plan, plan_text
from autopar.planner.plan.plan import Plan, with_graph
from autopar.planner.trace import trace
from tests.codegen.plans import plan_for

EVIL = "\"\"\"\nimport os; os.abort()  # ' \\ {x} {{ y }} é __import__('os')"
SOURCE = '''"""A model."""

import torch
from torch import Tensor, nn

INNER = {inner!r}


class Net(nn.Module):
    """One layer whose name is not nice."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(INNER, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self._modules[INNER](x).square().mean()


def build_model(note: str = "") -> nn.Module:
    return Net()


def example_batch(rows: int) -> dict[str, Tensor]:
    return {{"x": torch.randn(rows, 4)}}
'''


def plan_of(folder: Path, *, name: str, inner: str, note: str, zero: Zero = Zero.NONE) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(SOURCE.format(inner=inner), encoding="utf-8")
    arguments = (f"note={note}",)
    file = load_model_file(str(path), arguments)
    return plan_for(file, trace(file), arguments, degrees=(1, 2, 1), zero_levels=(zero,))


def strings(script: str) -> list[str]:
    nodes = ast.walk(ast.parse(script))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_an_argument_stays_an_argument(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, name="net.py", inner="fc", note=EVIL)
    script = emit(plan, destination=tmp_path / "train.py")
    assert EVIL in strings(script)
    attributes = {n.attr for n in ast.walk(ast.parse(script)) if isinstance(n, ast.Attribute)}
    assert "abort" not in attributes


@pytest.mark.parametrize("folder", ["it's", 'a"b', "new\nline", "{brace}", "é", "back\\slash"])
def test_a_folder_stays_a_folder(folder: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, name="net.py", inner="fc", note="")
    place = tmp_path / folder / "net.py"
    place.parent.mkdir()
    place.write_bytes((tmp_path / "net.py").read_bytes())
    moved = replace(plan, model=replace(plan.model, spec=str(place)))
    script = emit(moved, destination=tmp_path / "train.py")
    assert folder in strings(script)


@pytest.mark.parametrize("name", ["my-net.py", "class.py", "a b.py", "é.py", "x;y.py", 'q"q.py'])
def test_a_file_whose_name_is_no_identifier_is_imported_by_its_name(
    name: str, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, name=name, inner="fc", note="")
    script = emit(plan, destination=tmp_path / "train.py")
    assert "model_file = importlib.import_module(" in script
    assert name.removesuffix(".py") in strings(script)


@pytest.mark.parametrize("inner", ['a"b', "new\nline", "import", "x y", "__import__('os')", "é"])
def test_the_name_of_a_module_stays_a_name(inner: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, name="net.py", inner=inner, note="", zero=Zero.PARAMETERS)
    script = emit(plan, destination=tmp_path / "train.py")
    assert any(inner in text for text in strings(script))


def test_the_name_of_the_script_stays_in_its_docstring(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, name="net.py", inner="fc", note="")
    script = emit(plan, destination=tmp_path / 'x"""\nimport os\n.py')
    assert "import os" not in [line.strip() for line in script.splitlines()]


def test_the_version_of_who_planned_stays_in_its_comment(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, name="net.py", inner="fc", note='"""')
    forged = replace(plan, autopar='1\nimport os\nos.abort()\nNOTE = """')
    script = emit(forged, destination=tmp_path / "train.py")
    names = {n.id for n in ast.walk(ast.parse(script)) if isinstance(n, ast.Name)}
    assert "os" not in names
    assert "# Written by autopar 1 import os os.abort() NOTE" in script


def test_what_is_behind_the_version_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, name="net.py", inner="fc", note="")
    monkeypatch.setattr(emitting, "with_checksum", lambda script, _: f"{script}\nprint(1)\n")
    with pytest.raises(UnsafeScriptError, match="print"):
        emit(plan, destination=tmp_path / "train.py")


def test_a_plan_whose_every_text_is_hostile_has_the_script_of_a_harmless_one(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path, name="net.py", inner="fc", note="note")
    place = tmp_path / "train.py"
    table = json.loads(plan_text(replace(plan, model=replace(plan.model, spec="net.py"))))

    def emitted(names: dict[str, str]) -> str:
        changed = json.dumps(_renamed(table, names))
        read = parse_plan(changed, where="plan.json")
        return emit(with_graph(read, plan.graph), destination=place)

    hostile: dict[str, str] = {}
    for text in dict.fromkeys(_texts(table)):
        trial = hostile | {text: text + EVIL}
        try:
            emitted(trial)
        except AutoparError:
            continue  # refused: a word that must be one of some, or a name of the model's
        hostile = trial
    assert len(hostile) > 20
    harmless = {text: f"{text}_1" for text in hostile}
    trees = [ast.parse(emitted(names)) for names in (hostile, harmless)]
    kinds = [[type(node) for node in ast.walk(tree)] for tree in trees]
    assert kinds[0] == kinds[1]
    names = {n.id for n in ast.walk(trees[0]) if isinstance(n, ast.Name)}
    assert not names & {"os", "__import__"}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Return a JSON value with texts exchanged wherever they stand; keys stay."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {key: _renamed(inner, names) for key, inner in value.items()}
    return [_renamed(inner, names) for inner in value] if isinstance(value, list) else value
