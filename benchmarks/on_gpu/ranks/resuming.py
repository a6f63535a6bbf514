"""Resumes from a checkpoint, and compares bit by bit with a training that was not stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from autopar.codegen.proof.script_rank import imported
from autopar.planner.precision import Precision
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.cases import GPT2, Case, written
from benchmarks.on_gpu.ranks.joining import joined_alone
from benchmarks.on_gpu.report import Cell, Row

TABLE = "Ranks: a checkpoint, and a training that goes on from it, with dropout"
_STEPS = 6
_CASES = (
    Case(name="bf16", model=GPT2, pins={"microbatch": 4}),
    Case(name="fp16", model=GPT2, pins={"microbatch": 4}, precision=Precision.FP16),
)


def resume_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each precision."""
    for case in _CASES[:1] if context.tiny else _CASES:
        with TemporaryDirectory(prefix="on-gpu-") as folder:
            script = written(case, folder).script
            run = context.alone if context.tiny else context.fresh
            cells = run(_resumed, script, folder, context.device, seconds=90)
        yield Row(table=TABLE, cells={"script": case.name, **cells})


def _resumed(script: str, folder: str, device: str) -> dict[str, Cell]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # sums always in the same order
    torch.use_deterministic_algorithms(True, warn_only=True)
    place = Path(folder)
    try:
        straight = _run(script, device, place / "straight", _STEPS)
        repeated = _run(script, device, place / "repeated", _STEPS)
        kept = ["--checkpoint", str(place / "kept")]
        before = _run(script, device, place / "before", _STEPS // 2, *kept)
        after = _run(script, device, place / "after", _STEPS, *kept)
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "losses of two straight runs": _same([*straight[0]], [*repeated[0]]),
        "their weights": _same_weights(straight[1], repeated[1]),
        "losses of the resumed run": _same([*straight[0]], [*before[0], *after[0]]),
        "its weights": _same_weights(straight[1], after[1]),
    }


def _run(
    path: str, device: str, folder: Path, steps: int, *arguments: str
) -> tuple[list[float], dict[str, Tensor]]:
    weights = folder / "model.safetensors"
    script: Any = imported(Path(path))
    own = ["--steps", str(steps), "--log-every", "1", "--lr", "0.01", "--data", "synthetic"]
    with joined_alone(device):
        _, losses = script.main([*own, "--export", str(weights), *arguments])
    return losses, load_file(weights)


def _same(expected: list[float], found: list[float]) -> str:
    if expected == found:
        return "equal to the bit"
    return f"DIFFERENT: {found} instead of {expected}"


def _same_weights(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    unlike = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    if not unlike:
        return "equal to the bit"
    most = max(float((expected[n].float() - found[n].float()).abs().max()) for n in unlike)
    return f"DIFFERENT: {len(unlike)} of {len(expected)}, by {most:.2g} at most"
