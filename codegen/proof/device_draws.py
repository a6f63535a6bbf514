"""Runs ranks of a script on a pretended device, and tells whether layers that run again draw alike.

A training on CPUs does not show this: torch keeps the CPU's generator for a layer that runs again
in other cases than a GPU's. `python -m autopar.codegen.proof.device_draws SCRIPT RANK/WORLD …`
prints a list of sentences, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autopar.codegen.proof.draw_audit import drawn_otherwise_again
from autopar.codegen.proof.draws import Draw, Drawing, settings_of
from autopar.codegen.proof.dryrun.numbers import sizes_of_numbers
from autopar.codegen.proof.dryrun.rank import Step, run_first_step
from autopar.codegen.proof.pretended_device import NAME, Made, PretendedDevice, pretend
from autopar.runtime import pipeline  # noqa: F401  loaded once for all processes
from autopar.runtime.ranks import mesh

_ATEN = torch.ops.aten
_attention = functional.scaled_dot_product_attention


class DeviceDrawing(Drawing):  # type: ignore[no-untyped-call]
    """Records every op that draws numbers on the pretended device."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__(unseeded=-1)
        self.device = device

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        made = func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and "backward" not in func.name()
        if draws and kwargs.get("generator") is None:
            first = made[0] if isinstance(made, (tuple, list)) else made
            if isinstance(first, Tensor) and first.device.type == NAME:
                settings = settings_of(func, args, kwargs)
                self._note(func, settings, made, str(self.device.draw()), is_seeded=True)
        return made


def device_draw_faults(script: Path, ranks: Sequence[int], world: int) -> tuple[str, ...]:
    """Return what layers of a script draw otherwise where they run again, a sentence each."""
    words = [f"{rank}/{world}" for rank in ranks]
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(script), *words],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return tuple(found)


def draws_of(path: Path, device: PretendedDevice) -> tuple[Draw, ...]:
    """Run a script's `main` up to the end of its first step; return what that drew."""
    found: list[Draw] = []

    def watched(step: Step, _: None) -> None:
        with _attention_of_gpus(), DeviceDrawing(device) as drawing:
            step.take()
        found.extend(drawing.draws(step.parts))

    run_first_step(path, _without_values(), watched)
    return tuple(found)


@contextmanager
def _without_values() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), sizes_of_numbers():
        yield


@contextmanager
def _attention_of_gpus() -> Iterator[None]:
    """Have attention with dropout be one op that draws, as GPUs have it."""
    with patch.object(functional, "scaled_dot_product_attention", _fused):
        yield


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not dropout_p or query.dim() != 4:
        return _attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    out: Tensor = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return out


def main(script: str, *ranks: str) -> None:
    """Print what layers of these ranks draw otherwise where they run again."""
    device = pretend()
    found: dict[str, None] = {}
    for rank in ranks:
        here, there = get_context("fork").Pipe(duplex=False)
        running = get_context("fork").Process(target=_tell, args=(script, rank, device, there))
        running.start()
        there.close()
        try:
            found |= dict.fromkeys(here.recv())
        except EOFError:
            running.join()
            sys.exit(f"rank {rank} failed")
        running.join()
    print(json.dumps(list(found)))


def _tell(script: str, rank: str, device: PretendedDevice, to: Connection) -> None:
    os.environ[mesh.DRY_RUN] = rank
    with Made():
        to.send(list(drawn_otherwise_again([draws_of(Path(script), device)])))


if __name__ == "__main__":
    main(*sys.argv[1:])
