"""A model file is imported as a module of its package where it imports from that."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.model.functions import sources
from autopar.planner.model.guard import import_name
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import source_hash

FACTORY = "\ndef build_model(): return part\ndef example_batch(batch_size): return {}\n"


def package(folder: Path, part: str = "'one'") -> Path:
    """Write src/net/zoo/model.py, which imports from two levels of its package."""
    files = {
        "src/net/__init__.py": "",
        "src/net/parts.py": f"from .sizes import WIDTH\npart = {part}\n",
        "src/net/sizes.py": "WIDTH = 4\n",
        "src/net/unused.py": "",
        "src/net/zoo/__init__.py": "",
        "src/net/zoo/model.py": f"from ..parts import part\n{FACTORY}",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "src/net/zoo/model.py"


def test_a_relative_import_makes_a_file_a_module_of_its_package(tmp_path: Path) -> None:
    name = import_name(package(tmp_path))
    assert (name.name, name.folder) == ("net.zoo.model", tmp_path / "src")
    assert name.home == tmp_path / "src/net"


@pytest.mark.parametrize("line", ["from net.parts import part", "import net.parts"])
def test_so_does_an_import_of_the_package_by_its_name(line: str, tmp_path: Path) -> None:
    path = package(tmp_path)
    path.write_text(f"{line}\n", encoding="utf-8")
    assert import_name(path).name == "net.zoo.model"


@pytest.mark.parametrize("line", ["from network import part", "import torch", "def broken(:"])
def test_a_file_that_imports_nothing_of_its_package_stands_alone(line: str, tmp_path: Path) -> None:
    path = package(tmp_path)
    path.write_text(f"{line}\n", encoding="utf-8")
    name = import_name(path)
    assert (name.name, name.folder, name.home) == ("model", path.parent, path.parent)


def test_packages_of_one_name_in_two_folders_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    for part in ("one", "other"):
        path = package(tmp_path / part, repr(part))
        assert load_model_file(str(path)).build_model() == part


def test_what_a_module_of_a_package_imports_counts_as_its_source(tmp_path: Path) -> None:
    path = package(tmp_path)
    names = [file.relative_to(tmp_path / "src/net").as_posix() for file in sources(path)]
    assert names == ["parts.py", "sizes.py", "zoo/model.py"]
    before = source_hash(path)
    (tmp_path / "src/net/sizes.py").write_text("WIDTH = 8\n", encoding="utf-8")
    assert source_hash(path) != before
