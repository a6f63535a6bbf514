"""Mistakes that people make at the command line: committed, and judged by what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from tests.autopar.commands import Ran

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()

class Model(nn.Module):
    def __init__(self, width=8, depth=3):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

def build_model(width: int = 8, depth: int = 3):
    return Model(width, depth)

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 4)}

def loss(outputs, batch):
    return outputs.square().mean()
"""
_MOST_LINES, _MOST_CHARACTERS = 8, 1000
NO_FILES: Mapping[str, str | bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """What a person runs, the files that lie there, and what they should read."""

    arguments: tuple[str, ...]
    telling: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    code: int = 2


def mistake(
    command: str, *telling: str, files: Mapping[str, str | bytes] = NO_FILES, code: int = 2
) -> Mistake:
    """Return the mistake of a command line; what is telling may be one text, parted by ` … `."""
    parts = tuple(part for text in telling for part in text.split(" … "))
    return Mistake(arguments=tuple(command.split()), telling=parts, files=files, code=code)


def changed(addition: str) -> dict[str, str | bytes]:
    """Return the model file with later definitions that replace some of it."""
    return {"model.py": f"{MODEL}\n{addition}\n"}


class Commit(Protocol):
    """Runs a mistake in a folder with its files; without a folder, in that of the test."""

    def __call__(self, mistake: Mistake, folder: Path | None = None) -> Ran: ...


class Tell(Protocol):
    """Runs a mistake, and checks that one short message says what is telling of it."""

    def __call__(self, mistake: Mistake, folder: Path | None = None) -> None: ...


def assert_clear(ran: Ran, mistake: Mistake) -> None:
    """Check that one short message says what is telling, with the right code."""
    told = " ".join(ran.err.split())
    for telling in mistake.telling:
        assert telling in told
    assert ran.code == mistake.code
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("error: ") <= 1
    assert len(ran.err.splitlines()) <= _MOST_LINES
    assert len(ran.err) <= _MOST_CHARACTERS


def contents_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if "__pycache__" not in path.parts}
