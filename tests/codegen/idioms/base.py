"""The small language model that idioms change in one place, as the text of a model file.

Its constructor seeds itself, so that plain PyTorch and every plan begin with the same weights.
"""

BASE = """
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH = 24, 16, 6


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers=2, width=WIDTH, words=WORDS):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def embed(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def hidden(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids):
        return self.head(self.hidden(ids))


def seeded(constructor, *args, **kwargs):
    torch.manual_seed(7)
    return constructor(*args, **kwargs)


def build_model():
    return seeded(Model)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def rows(count, seed):
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (count, LENGTH + 1), generator=numbers)
    return [{"ids": one[:-1], "labels": one[1:]} for one in ids]


def build_dataset():
    return rows(20, 1)


def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)
"""
