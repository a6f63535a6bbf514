"""Runs the command line as a function: arguments in, exit code and texts out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from autopar import cli


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


Autopar = Callable[..., Ran]  # the words of a command line → what it left behind


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> Ran:
    """Run `autopar` with some arguments; plans are verified where that is asked for."""
    if arguments[:1] == ("plan",) and "--verify" not in arguments:
        arguments = (*arguments, "--no-verify")  # which takes as long as all the rest
    monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    captured = capsys.readouterr()
    code = raised.value.code
    return Ran(code=code if isinstance(code, int) else 0, out=captured.out, err=captured.err)
