"""A script says where the model file is no longer the one that its classes come from."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from autopar.runtime.ranks.mesh import start, stop
from autopar.runtime.ranks.user_code import refuse_changes, source_digest, warn_if_changed


def test_a_changed_model_file_is_noted_and_an_unchanged_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, neighbour, module = tmp_path / "net.py", tmp_path / "parts/block.py", ModuleType("net")
    module.__file__ = str(path)
    neighbour.parent.mkdir()
    for file in (path, neighbour):
        file.write_text("x = 1\n", encoding="utf-8")
    names, mesh = ("net.py", "parts/block.py"), start(pipeline=1, data=1, tensor=1)
    digest = source_digest([path, neighbour])
    warn_if_changed(module, names, digest, mesh)
    assert capsys.readouterr().err == ""
    neighbour.write_text("x = 2\n", encoding="utf-8")
    warn_if_changed(module, names, digest, mesh)
    assert "net.py, or a file that it imports, has changed since" in capsys.readouterr().err
    warn_if_changed(module, names[:1], source_digest([neighbour]), mesh)
    assert "note: net.py has changed since this script was written" in capsys.readouterr().err
    stop(mesh)


def test_forwards_of_a_model_that_has_changed_do_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, module = tmp_path / "net.py", ModuleType("net")
    module.__file__ = str(path)
    path.write_text("x = 1\n", encoding="utf-8")
    digest = source_digest([path])
    refuse_changes(module, ("net.py",), digest)
    path.write_text("x = 2\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="6"):
        refuse_changes(module, ("net.py",), digest)
    told = capsys.readouterr().err
    assert (
        "net.py has changed since this script was written, and the script contains forwards" in told
    )
    refuse_changes(module, ("net.py",), told.split('"')[1])  # as it says


def test_comments_and_docstrings_are_no_change_and_code_is(tmp_path: Path) -> None:
    path = tmp_path / "net.py"

    def digest(code: str) -> str:
        path.write_text(code, encoding="utf-8")
        return source_digest([path])

    plain = digest("def f(x):\n    return x + 1\n")
    assert (
        digest('"""A file."""\n\n\ndef f(x):\n    """Add."""\n    # one\n    return x + 1\n')
        == plain
    )
    assert digest("def f(x):\n    return (x\n        + 1)  # one more\n") == plain
    assert digest("def f(x):\n    return x + 2\n") != plain
    assert digest('def f(x):\n    return x + "1"\n') != plain
    assert digest("def f(x, y=None):\n    return x + 1\n") != plain
