"""A small language model that returns its loss and logits in any form, with metrics of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

_FILE = """
import dataclasses
import typing

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

VOCAB = 20


class Named(typing.NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Plain:
    logits: torch.Tensor
    loss: torch.Tensor
    hidden: torch.Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCAB)

    def forward(self, x, y):
        first = hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        return RETURNED


def build_model():
    return Model()


def example_batch(batch_size):
    x, y = torch.randint(VOCAB, (2, batch_size, 6))
    return {"x": x, "y": y}


def rows(count, seed):
    torch.manual_seed(seed)
    whole = example_batch(count)
    whole["y"][::3, 2:] = -100
    return [{key: value[n] for key, value in whole.items()} for n in range(count)]


def build_dataset():
    return rows(24, 1)


def build_eval_dataset():
    return rows(15, 2)


def metrics(outputs, batch):
    logits = LOGITS
    counted = batch["y"] != -100
    found = {"accuracy": (logits.argmax(-1) == batch["y"])[counted], "logits": logits.abs()}
    MORE
    return found
"""
_OWN_LOSS = """

def loss(outputs, batch):
    return F.cross_entropy(LOGITS.flatten(0, 1), batch["y"].flatten(), ignore_index=-100)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a forward returns, how metrics reach the logits in it, and what else they measure."""

    returned: str
    logits: str
    more: str = ""
    has_own_loss: bool = False


_HIDDEN = "found['hidden'] = {}.mean((1, 2))"
FORMS: Mapping[str, Form] = {
    "logits": Form(returned="logits", logits="outputs", has_own_loss=True),
    "loss and logits": Form(returned="(loss, logits)", logits="outputs[1]"),
    "a list in a tuple": Form(
        returned="(loss, (logits, [hidden]))",
        logits="outputs[1][0]",
        more=_HIDDEN.format("outputs[1][1][0]"),
    ),
    "a dict": Form(returned="{'loss': loss, 'logits': logits}", logits="outputs['logits']"),
    "a list in a dict in a dict": Form(
        returned="{'loss': loss, 'out': {'made': [logits, hidden]}}",
        logits="outputs['out']['made'][0]",
        more=_HIDDEN.format("outputs['out']['made'][1]"),
    ),
    "a namedtuple": Form(
        returned="Named(logits, loss, hidden)",
        logits="outputs.logits",
        more=_HIDDEN.format("outputs[2]") + "; logits, loss, hidden = outputs",
    ),
    "a namedtuple for a loss": Form(
        returned="Named(logits, logits.mean(), hidden)", logits="outputs.logits", has_own_loss=True
    ),
    "a dataclass": Form(
        returned="Plain(logits, loss, hidden)",
        logits="outputs.logits",
        more=_HIDDEN.format("outputs.hidden"),
    ),
    "a dataclass for a loss": Form(
        returned="Plain(logits, logits.mean(), hidden)", logits="outputs.logits", has_own_loss=True
    ),
    "a library's outputs": Form(
        returned="CausalLMOutput(loss=loss, logits=logits, hidden_states=(hidden,))",
        logits="outputs['logits']",
        more=_HIDDEN.format("outputs[2][0]") + "; assert outputs.logits is outputs[1]",
    ),
    "a library's outputs in a dict": Form(
        returned="{'loss': loss, 'out': BaseModelOutput(last_hidden_state=logits)}",
        logits="outputs['out'].last_hidden_state",
    ),
}
UNMADE = Form(
    returned="{'loss': loss, 'logits': logits, 'hits': logits.argmax(-1) == y}",
    logits="outputs['logits']",
)


def returning(folder: Path, form: Form) -> Path:
    """Write the model file of a form, and return its place."""
    text = _FILE + (_OWN_LOSS if form.has_own_loss else "")
    for name, code in (("RETURNED", form.returned), ("LOGITS", form.logits), ("MORE", form.more)):
        text = text.replace(name, code)
    path = folder / f"returning_{crc32(text.encode())}.py"  # processes of tests keep their imports
    path.write_text(text, encoding="utf-8")
    return path
