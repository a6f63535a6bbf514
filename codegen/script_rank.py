"""Runs an emitted script as one rank, and keeps what can be compared.

`torchrun … -m autopar.codegen.script_rank SCRIPT FOLDER ARGUMENTS…` leaves rank-R.pt in FOLDER.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from autopar.codegen.exactness import Exactly
from autopar.codegen.reference import trained_tensors
from autopar.runtime.chunks import Chunks, chunks_by_name
from autopar.runtime.optimizer_pieces import local_tensor

NAME = "emitted_script"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrained:
    """What one rank saw and holds; the losses are the same on every rank."""

    losses: tuple[float, ...]
    gradients: dict[str, tuple[Chunks, Tensor]]
    parameters: dict[str, tuple[Chunks, Tensor]]


def run_script(path: str, arguments: Sequence[str]) -> RankTrained:
    """Run a script's main here; gradients are those of the first step, clipped."""
    script: Any = imported(Path(path))
    clip, gradients = script.clip_by_global_norm, dict[str, tuple[Chunks, Tensor]]()
    train_step = script.train_step

    def clip_and_keep(parts: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Tensor:
        norm: Tensor = clip(parts, *args, **kwargs)
        if not gradients:
            gradients.update(_held(parts, of_gradients=True))
        return norm

    named = dict(pairwise(arguments)).get("--dtype", script.DTYPE)

    def train_exactly(*args: Any) -> Tensor:
        with Exactly(script.DTYPES[named]):
            loss: Tensor = train_step(*args)
        return loss

    script.clip_by_global_norm, script.train_step = clip_and_keep, train_exactly
    parts, losses = script.main(arguments)
    return RankTrained(
        losses=tuple(losses), gradients=gradients, parameters=_held(parts, of_gradients=False)
    )


def imported(path: Path) -> ModuleType:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def _held(parts: Sequence[nn.Module], *, of_gradients: bool) -> dict[str, tuple[Chunks, Tensor]]:
    held = {}
    for part in parts:
        chunks = chunks_by_name(part)
        for name, tensor in trained_tensors(part):
            value = tensor.grad if of_gradients else tensor
            if value is not None:
                held[name] = (chunks[name], local_tensor(value.detach()).double().clone())
    return held


def rank_file(folder: Path, rank: int) -> Path:
    """Return where a rank leaves what it has."""
    return folder / f"rank-{rank}.pickle"


if __name__ == "__main__":
    _, script_path, folder_name, *script_arguments = sys.argv
    trained = run_script(script_path, script_arguments)
    place = rank_file(Path(folder_name), int(os.environ.get("RANK", "0")))
    place.write_bytes(pickle.dumps((trained.losses, trained.gradients, trained.parameters)))
