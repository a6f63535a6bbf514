"""The command line, and mistakes at it, as functions."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from tests.autopar.commands import Autopar, Ran, run
from tests.autopar.mistakes import Commit, Mistake, Tell, assert_clear, contents_of


@pytest.fixture
def autopar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Autopar:
    """Return the command line as a function, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return partial(run, monkeypatch, capsys)


@pytest.fixture
def commit(autopar: Autopar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commit:
    """Return what runs a mistake in a folder, which it leaves as it was."""

    def committed(mistake: Mistake, folder: Path | None = None) -> Ran:
        monkeypatch.chdir(folder or tmp_path)
        for name, content in mistake.files.items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        before = contents_of(Path())
        ran = autopar(*mistake.arguments)
        assert contents_of(Path()) == before, "a refused command leaves files as they were"
        return ran

    return committed


@pytest.fixture
def tell(commit: Commit) -> Tell:
    """Return what checks that a mistake is told."""
    return lambda mistake, folder=None: assert_clear(commit(mistake, folder), mistake)
