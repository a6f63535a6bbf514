"""A small language model, whole or cut into stages, and its training in one process."""

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

CLIP_NORM = 2.0  # the first steps are clipped, the last ones are not
VOCABULARY, WIDTH, SEQUENCE, BATCH, LAYERS, STEPS = 17, 10, 5, 4, 8, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.down(torch.tanh(self.up(self.norm(x)))))


class SmallModel(nn.Module):
    """Tied weights, an unused layer, frozen ones by choice, and a second tensor across each cut."""

    def __init__(self, *, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Linear(3, 3)
        if tied:
            self.head.weight = self.tokens.weight
        if frozen:
            for module in (self.tokens, self.places, self.layers["0"]):
                module.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor, note: str) -> Tensor:
        assert note == "kept"
        x, skip = self.tokens(ids), self.places.weight
        for layer in self.layers.values():
            x = layer(x) + skip
        return loss_of(self.head(x), labels)


class Part(nn.Module):
    """Stage `index` of `count`: names as in the whole model."""

    def __init__(self, model: SmallModel, index: int, count: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        if self.is_first:
            self.tokens, self.places, self.unused = model.tokens, model.places, model.unused
        each = LAYERS // count
        names = [str(number) for number in range(index * each, (index + 1) * each)]
        self.layers = nn.ModuleDict({name: model.layers[name] for name in names})
        if self.is_last:
            self.head = model.head

    def forward(
        self, *received: Tensor, ids: Tensor, labels: Tensor, note: str
    ) -> Tensor | tuple[Tensor, ...]:
        assert note == "kept"
        if self.is_first:
            x = self.tokens(ids)
            skip = self.places.weight.expand_as(x).contiguous()
        else:
            x, skip = received
        for layer in self.layers.values():
            x = layer(x) + skip
        return loss_of(self.head(x), labels) if self.is_last else (x, skip)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(
    dtype: torch.dtype = torch.float64, *, tied: bool = False, frozen: bool = False
) -> SmallModel:
    torch.manual_seed(1)
    return SmallModel(tied=tied, frozen=frozen).to(dtype)


def weight_decay_on_matrices(parameters: Iterable[nn.Parameter]) -> Optimizer:
    chosen = list(parameters)
    matrices = [parameter for parameter in chosen if parameter.dim() > 1]
    vectors = [parameter for parameter in chosen if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-2)


def microbatches(
    step: int, count: int, *, rank: int = 0, ranks: int = 1
) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(step)
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    made = []
    for _ in range(count):
        ids, labels = torch.randint(0, VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
        made.append({"ids": ids[share], "labels": labels[share], "note": "kept"})
    return made


def weights(count: int) -> list[Tensor]:
    """Unequal, as padding makes them."""
    raw = torch.arange(1.0, count + 1, dtype=torch.float64)
    return list(raw / raw.sum())


@cache
def trained_alone(
    count: int, *, dtype: torch.dtype = torch.float64, tied: bool = False, frozen: bool = False
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """Return losses and parameters of the same training in one process."""
    model = build(dtype, tied=tied, frozen=frozen)
    optimizer = weight_decay_on_matrices(p for p in model.parameters() if p.requires_grad)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for microbatch, weight in zip(microbatches(step, count), weights(count), strict=True):
            loss = model(**microbatch) * weight
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        losses.append(total)
    return tuple(losses), {name: value.detach() for name, value in model.named_parameters()}


def whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Gather what is sharded."""
    gather = "full_tensor"
    return {
        name: (getattr(value, gather)() if hasattr(value, gather) else value).detach().clone()
        for name, value in parameters
    }


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max((value - expected[name]).abs().max().item() for name, value in found.items())


def loss_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
