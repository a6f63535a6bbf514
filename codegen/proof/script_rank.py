"""Runs an emitted script as one rank, and keeps what can be compared.

`torchrun … -m autopar.codegen.proof.script_rank SCRIPT FOLDER ARGUMENTS…` leaves rank-R.pt there.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.codegen.proof.comparison import Block, Held
from autopar.codegen.proof.exactness import Exactly
from autopar.codegen.proof.reference import trained_tensors
from autopar.runtime.chunks import boxes, chunks_by_name
from autopar.runtime.held_gradients import held_gradients
from autopar.runtime.optimizer_pieces import local_tensor

NAME = "emitted_script"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrained:
    """What one rank saw and holds; the losses are the same on every rank."""

    losses: tuple[float, ...]
    gradients: Held
    parameters: Held


def run_script(path: str, arguments: Sequence[str]) -> RankTrained:
    """Run a script's main here; gradients are those of the first step, clipped."""
    script: Any = imported(Path(path))
    clip, gradients = script.clip_by_global_norm, list[Block]()

    def clip_and_keep(parts: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Tensor:
        norm: Tensor = clip(parts, *args, **kwargs)
        if not gradients:
            gradients.extend(block for part in parts for block in _gradients(part))
        return norm

    script.clip_by_global_norm = clip_and_keep
    dtype = script.DTYPES[dict(pairwise(arguments)).get("--dtype", script.DTYPE)]
    for name in ("train_step", "valid_targets"):
        if hasattr(script, name):  # not all losses have targets to count
            setattr(script, name, _exactly(getattr(script, name), dtype))
    parts, losses = script.main(arguments)
    return RankTrained(
        losses=tuple(losses),
        gradients=tuple(gradients),
        parameters=tuple(block for part in parts for block in _parameters(part)),
    )


def _exactly(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    def exact(*args: Any) -> Tensor:
        with Exactly(dtype):
            return function(*args)

    return exact


def imported(path: Path) -> ModuleType:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def _parameters(part: nn.Module) -> Iterator[Block]:
    chunks = chunks_by_name(part)
    for name, tensor in trained_tensors(part):
        yield Block(name, chunks[name], _kept(local_tensor(tensor)))


def _gradients(part: nn.Module) -> Iterator[Block]:
    """Yield gradients by all names of their parameters, under ZeRO-1 in this rank's parts."""
    chunks, names = chunks_by_name(part), defaultdict[int, list[str]](list)
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for one in held_gradients([part]):
        for name in names[id(one.parameter)]:
            if one.span is None:
                yield Block(name, chunks[name], _kept(one.held))
                continue
            first = 0
            for box in boxes(tuple(one.parameter.shape), one.span.start, one.span.stop):
                held = chunks[name].within_box(box)
                last = first + math.prod(held.local_shape)
                yield Block(name, held, _kept(one.held[first:last].view(held.local_shape)))
                first = last


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().double().clone()


def rank_file(folder: Path, rank: int) -> Path:
    """Return where a rank leaves what it has."""
    return folder / f"rank-{rank}.pickle"


if __name__ == "__main__":
    _, script_path, folder_name, *script_arguments = sys.argv
    trained = run_script(script_path, script_arguments)
    place = rank_file(Path(folder_name), int(os.environ.get("RANK", "0")))
    place.write_bytes(pickle.dumps((trained.losses, trained.gradients, trained.parameters)))
