"""What a training leaves, made at once: a checkpoint of a small model, the record of a run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from autopar.runs.run_record import RunRecord, RunState
from autopar.runtime.checkpointing.manifest import Moment
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import start, stop
from tests.runtime.checkpointing import written


class Small(nn.Module):
    """A layer of the model in tests.autopar.mistakes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)


def write_checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint of one rank, and return where it is."""
    mesh = start(pipeline=1, data=1, tensor=1)
    torch.manual_seed(0)
    model = Small()
    optimizer = build_optimizer([model], lambda p: AdamW(p, lr=0.1), zero=0, mesh=mesh)
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    moment = Moment(step=step, rows=8 * step, updates=step)
    built = dict.fromkeys(model.state_dict(), torch.float32)
    failure = written.write_checkpoint(folder, moment, "m", [model], optimizer, mesh, built=built)
    stop(mesh)
    assert failure is None
    return folder / f"step-{step}"


def signed(manifest: str) -> str:
    """Return a manifest that tells of itself that nobody has changed it."""
    content = json.loads(manifest)
    content.pop("sha256", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def record_text() -> str:
    """Return run.json of a run that has finished."""
    record = RunRecord(
        name="mine",
        model="model.py",
        arguments=(),
        plan="one device",
        predicted_step_seconds=0.5,
        command="torchrun train.py",
        checkpoints="checkpoints",
        metrics="metrics.jsonl",
        host="here",
        process=1,
        started_at=1.0,
        ended_at=2.0,
        state=RunState.FINISHED,
    )
    return json.dumps(asdict(record))
