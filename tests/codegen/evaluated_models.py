"""Model files with rows to evaluate on, and their loss by the loop that a person would write."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from autopar.planner.model.model_file import ModelFile
from autopar.runtime.checkpointing.finding import Checkpoint
from autopar.runtime.checkpointing.manifest import read_manifest
from autopar.runtime.checkpointing.restoring import Reader
from autopar.runtime.checkpointing.states import WEIGHT
from autopar.runtime.tensor.shards import whole
from tests.planner.subjects import ZOO

COUNT = 15  # rows to evaluate on: the last of them fill no batch of the plans in tests

_GPT2 = f"""

def build_eval_dataset(size="tiny", seq_len=None, vocab_size=None):
    data = build_dataset(size, None, 64, seq_len, vocab_size)
    rows = [data[63 - number] for number in range({COUNT})]
    for number, row in enumerate(rows):  # of each row another share counts
        row["labels"] = row["labels"].clone()
        row["labels"][1 + number * 4 :] = -100
    return rows
"""

_SMALL = f"""
import torch
import torch.nn.functional as F
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), NORM, nn.Tanh(), nn.Dropout(0.3))
        self.number, self.kind = nn.Linear(8, 3), nn.Linear(8, 5)

    def forward(self, x):
        x = self.body(x)
        return self.number(x), self.kind(x)


def build_model():
    return Small()


def example_batch(batch_size):
    return {{
        "x": torch.randn(batch_size, 6),
        "y": torch.randn(batch_size, 3),
        "kind": torch.randint(5, (batch_size,)),
        "mask": torch.rand(batch_size, 3),
    }}


def rows(count, seed):
    torch.manual_seed(seed)
    whole = example_batch(count)
    whole["kind"][::3] = -100
    return [{{key: value[n] for key, value in whole.items()}} for n in range(count)]


def build_dataset():
    return rows(24, 1)


def build_eval_dataset():
    return EVALUATED(rows({COUNT}, 2))


def loss(outputs, batch):
    number, kind = outputs
    return LOSS
"""

_METRICS = """

def metrics(outputs, batch):
    number, kind = outputs
    valid = batch["kind"] != -100
    hits = kind.argmax(-1) == batch["kind"]
    return METRICS
"""


_LIBRARY = f"""
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build_model():
    sizes = dict(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=96)
    drops = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False))


def example_batch(batch_size):
    tokens = torch.randint(0, 96, (batch_size, 16))
    return {{"input_ids": tokens, "labels": tokens}}


def rows(count, seed):
    torch.manual_seed(seed)
    return [{{"input_ids": one, "labels": one}} for one in torch.randint(0, 96, (count, 16))]


def build_dataset():
    return rows(24, 1)


def build_eval_dataset():
    return rows({COUNT}, 2)


def metrics(outputs, batch):
    logits, targets = outputs.logits[:, :-1], batch["labels"][:, 1:]
    assert outputs["logits"] is outputs[1]
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return {{"hits": (logits.argmax(-1) == targets), "perplexity": nats.mean(1).exp()}}
"""


def evaluated_library(folder: Path) -> Path:
    """Write a GPT-2 of Hugging Face with rows to evaluate on, and return its place."""
    path = folder / "evaluated_library.py"
    path.write_text(_LIBRARY, encoding="utf-8")
    return path


def evaluated_gpt2(folder: Path) -> Path:
    """Write GPT-2 with rows to evaluate on, and return its place."""
    for name in ("sizes.py", "token_data.py"):
        (folder / name).write_text((ZOO / name).read_text(encoding="utf-8"), encoding="utf-8")
    path = folder / "evaluated_gpt2.py"
    path.write_text((ZOO / "gpt2.py").read_text(encoding="utf-8") + _GPT2, encoding="utf-8")
    return path


def evaluated_small(
    folder: Path, loss: str, *, norm: str = "nn.Identity()", of: str = "list", metrics: str = ""
) -> Path:
    """Write a small model with a loss, and `of` what its rows to evaluate on are; return where.

    `metrics` are those that metrics() returns; without any there is no such function.
    """
    text = _SMALL.replace("LOSS", loss).replace("NORM", norm).replace("EVALUATED", of)
    text += _METRICS.replace("METRICS", metrics) if metrics else ""
    path = folder / f"small_{crc32(text.encode())}.py"  # processes of tests keep what they import
    path.write_text(text, encoding="utf-8")
    return path


def plain_loss(file: ModelFile, checkpoint: Path, *, rows: int = COUNT) -> float:
    """Return the loss of what a checkpoint has over so many rows, all of them in one batch."""
    assert file.loss is not None
    outputs, batch = plain_outputs(file, checkpoint, rows=rows)
    return float(file.loss(outputs, batch))


@torch.no_grad()
def plain_outputs(
    file: ModelFile, checkpoint: Path, *, rows: int = COUNT
) -> tuple[Any, dict[str, Tensor]]:
    """Return what a model that a checkpoint has makes of so many rows in one batch."""
    model: nn.Module = file.build_model().double()
    load_checkpoint(model, checkpoint)
    model.eval()
    assert file.build_eval_dataset is not None
    whole_batch = default_collate(list(file.build_eval_dataset())[:rows])
    batch = {k: v.double() if v.is_floating_point() else v for k, v in whole_batch.items()}
    return model(next(iter(batch.values()))), batch


def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Give a whole model the weights of a checkpoint."""
    checkpoint, kept = Checkpoint(folder, read_manifest(folder)), dict[str, Tensor]()
    with ExitStack() as files:
        reader = Reader(checkpoint, files)
        for name, tensor in model.state_dict().items():
            if WEIGHT + name in reader.keys:
                kept[name] = torch.empty_like(tensor)
                reader.fill(WEIGHT + name, whole(tuple(tensor.shape)), kept[name])
    missing, _ = model.load_state_dict(kept, strict=False)
    assert set(missing) <= {"lm_head.weight"}, "all but what is tied"
