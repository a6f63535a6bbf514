"""Predicts clicks with tables of embeddings and perceptrons (DLRM, Naumov et al. 2019).

Sizes: tiny, kaggle (the reference's arguments for Criteo's Kaggle data). Data: lines in Criteo's
format: a label, whole numbers and hexadecimal categories, separated by tabs.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sizes import pick_size
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the model; a visit has `hot` entries of each table, which are summed."""

    entries: tuple[int, ...]
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    numbers: int = 13
    hot: int = 1


_KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
SIZES = {
    "tiny": Config(entries=(64, 40, 24, 64), dim=16, bottom=(32,), top=(64, 32), numbers=6, hot=3),
    "kaggle": Config(entries=_KAGGLE, dim=16, bottom=(512, 256, 64), top=(512, 256)),
}


def perceptron(sizes: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers with a ReLU after each."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """Maps numbers, and entries of tables, to the logit of a click."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(entries, config.dim, mode="sum") for entries in config.entries
        )
        vectors = len(config.entries) + 1
        self.bottom = perceptron((config.numbers, *config.bottom, config.dim))
        self.top = perceptron((config.dim + vectors * (vectors - 1) // 2, *config.top))
        self.click = nn.Linear(config.top[-1], 1)

    def forward(self, numbers: Tensor, entries: Tensor) -> Tensor:
        """Map [batch, numbers] and [batch, tables, hot] to [batch]."""
        x = self.bottom(numbers)
        found = [table(entries[:, number]) for number, table in enumerate(self.tables)]
        vectors = torch.stack([x, *found], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(
            products.shape[1], products.shape[1], offset=-1, device=x.device
        )
        joined = torch.cat([x, products[:, rows, columns]], dim=1)
        logits: Tensor = self.click(self.top(joined))
        return logits.squeeze(1)


class Clicks(Dataset[dict[str, Tensor]]):
    """Visits, each with its numbers, its categories and whether there was a click."""

    def __init__(self, rows: list[tuple[bool, list[float], list[int]]], config: Config) -> None:
        self.rows, self.config = rows, config

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        clicked, numbers, categories = self.rows[index]
        config = self.config
        ids = torch.tensor(categories).view(len(config.entries), config.hot)
        return {
            "numbers": torch.tensor(numbers),
            "entries": ids % torch.tensor(config.entries)[:, None],
            "clicked": torch.tensor(float(clicked)),
        }


def read_rows(path: str, config: Config) -> list[tuple[bool, list[float], list[int]]]:
    """Read lines of a label, numbers and categories; an empty field counts as 0."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected lines of Criteo's data")
    if config.hot != 1:
        raise ValueError(f"a line has one entry of each table, and the model takes {config.hot}")
    width = 1 + config.numbers + len(config.entries)
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split("\t")
        if len(words) != width:
            raise ValueError(f"{path}:{number}: {len(words)} fields; expected {width}")
        label, *rest = words
        try:
            numbers = [float(np.log1p(max(int(word or 0), 0))) for word in rest[: config.numbers]]
            categories = [int(word or "0", 16) for word in rest[config.numbers :]]
            rows.append((bool(int(label)), numbers, categories))
        except ValueError:
            raise ValueError(f"{path}:{number}: a field is no number") from None
    if not rows:
        raise ValueError(f"{path}: the file is empty")
    return rows


def generated_rows(config: Config, items: int) -> list[tuple[bool, list[float], list[int]]]:
    """Return visits; clicks depend on the first category (odd or even) and the first number."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(items):
        numbers = random.normal(size=config.numbers).tolist()
        categories = random.integers(max(config.entries), size=(len(config.entries), config.hot))
        liked = int(categories[0, 0] % config.entries[0]) % 2
        rows.append((bool(liked + numbers[0] > 0.5), numbers, categories.flatten().tolist()))
    return rows


def build_model(size: str = "tiny", dim: int | None = None) -> nn.Module:
    """Return a model of a size, changed by the arguments that are not None."""
    return Dlrm(pick_size(SIZES, size, dim=dim))


def example_batch(batch_size: int, size: str = "tiny") -> dict[str, Tensor]:
    """Return random visits."""
    config = pick_size(SIZES, size)
    shape = (batch_size, config.hot)
    ids = [torch.randint(entries, shape) for entries in config.entries]
    return {
        "numbers": torch.randn(batch_size, config.numbers),
        "entries": torch.stack(ids, dim=1),
        "clicked": torch.randint(2, (batch_size,)).float(),
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of clicks, in nats."""
    return F.binary_cross_entropy_with_logits(outputs, batch["clicked"])


def build_dataset(
    size: str = "tiny", data: str | None = None, items: int = 2048
) -> Dataset[dict[str, Tensor]]:
    """Return the visits of the file `data`, or `items` generated ones."""
    config = pick_size(SIZES, size)
    rows = generated_rows(config, items) if data is None else read_rows(data, config)
    return Clicks(rows, config)
