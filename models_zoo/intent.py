"""Classifies what a sentence asks for, by the mean of its words (fastText, Joulin et al. 2016).

Sizes: tiny, ag_news (PyTorch's text classification tutorial). Data: lines of `label<TAB>text`.
"""

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sizes import pick_size
from torch import Tensor, nn
from torch.utils.data import Dataset

PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the classifier."""

    vocab_size: int
    dim: int
    intents: int
    seq_len: int = 32


SIZES = {
    "tiny": Config(vocab_size=1024, dim=32, intents=6, seq_len=12),
    "ag_news": Config(vocab_size=95811, dim=64, intents=4, seq_len=64),
}

# Words of the generated sentences: KEYWORDS of each intent, and FILLERS that occur with all.
KEYWORDS = (
    ("weather", "rain", "sunny", "umbrella", "forecast", "cold"),
    ("play", "song", "music", "album", "louder", "band"),
    ("alarm", "wake", "timer", "remind", "snooze", "morning"),
    ("book", "flight", "ticket", "hotel", "train", "seat"),
    ("balance", "transfer", "account", "pay", "card", "bill"),
    ("lights", "heating", "door", "lamp", "thermostat", "blinds"),
)
FILLERS = ("please", "can", "you", "the", "a", "my", "for", "me", "now", "what", "is", "it", "and")


class IntentClassifier(nn.Module):
    """Maps words to the logits of the intents."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(config.vocab_size, config.dim, mode="mean", padding_idx=PAD)
        self.intents = nn.Linear(config.dim, config.intents)

    def forward(self, words: Tensor) -> Tensor:
        """Map [batch, seq] to [batch, intents]; padding does not count."""
        x: Tensor = self.intents(self.words(words))
        return x


def word_ids(text: str, vocab_size: int, seq_len: int) -> Tensor:
    """Return one number per word, cut or padded to `seq_len`.

    A word's number is its checksum, so no vocabulary has to be built, kept or shipped.
    """
    found = re.findall(r"\w+", text.lower())[:seq_len]
    ids = [1 + zlib.crc32(word.encode()) % (vocab_size - 1) for word in found]
    return torch.tensor(ids + [PAD] * (seq_len - len(ids)))


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences, each with the number of its intent; numbers follow the sorted names."""

    def __init__(self, rows: list[tuple[str, str]], config: Config) -> None:
        names = sorted({label for label, _ in rows})
        if len(names) > config.intents:
            raise ValueError(
                f"{len(names)} intents found ({', '.join(names[:5])} …); the model knows "
                f"{config.intents}: give intents={len(names)}"
            )
        self.rows, self.config = rows, config
        self.number = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label, text = self.rows[index]
        words = word_ids(text, self.config.vocab_size, self.config.seq_len)
        return {"words": words, "labels": torch.tensor(self.number[label])}


def read_rows(path: str) -> list[tuple[str, str]]:
    """Read lines of a label, a tab and a text."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected lines of label<TAB>text")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        label, tab, text = line.partition("\t")
        if not (label.strip() and tab and text.strip()):
            raise ValueError(f"{path}:{number}: expected label<TAB>text, found {line[:60]!r}")
        rows.append((label.strip(), text))
    if not rows:
        raise ValueError(f"{path}: the file is empty")
    return rows


def generated_rows(intents: int, items: int) -> list[tuple[str, str]]:
    """Return sentences of three to six filler words and one word that belongs to the intent."""
    random = np.random.default_rng(0)
    rows = []
    for index in range(items):
        intent = index % min(intents, len(KEYWORDS))
        sentence = [str(word) for word in random.choice(FILLERS, size=random.integers(3, 7))]
        sentence.insert(int(random.integers(3)), str(random.choice(KEYWORDS[intent])))
        rows.append((str(intent), " ".join(sentence)))
    return rows


def build_model(
    size: str = "tiny",
    vocab_size: int | None = None,
    intents: int | None = None,
    dim: int | None = None,
) -> nn.Module:
    """Return a classifier of a size, changed by the arguments that are not None."""
    return IntentClassifier(pick_size(SIZES, size, vocab_size=vocab_size, intents=intents, dim=dim))


def example_batch(
    batch_size: int,
    size: str = "tiny",
    vocab_size: int | None = None,
    intents: int | None = None,
    seq_len: int | None = None,
) -> dict[str, Tensor]:
    """Return random words and intents."""
    config = pick_size(SIZES, size, vocab_size=vocab_size, intents=intents, seq_len=seq_len)
    return {
        "words": torch.randint(config.vocab_size, (batch_size, config.seq_len)),
        "labels": torch.randint(config.intents, (batch_size,)),
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per sentence, in nats."""
    return F.cross_entropy(outputs, batch["labels"])


def build_dataset(
    size: str = "tiny",
    data: str | None = None,
    items: int = 2048,
    vocab_size: int | None = None,
    intents: int | None = None,
    seq_len: int | None = None,
) -> Dataset[dict[str, Tensor]]:
    """Return the sentences of the file `data`, or `items` generated ones."""
    config = pick_size(SIZES, size, vocab_size=vocab_size, intents=intents, seq_len=seq_len)
    rows = generated_rows(config.intents, items) if data is None else read_rows(data)
    return Sentences(rows, config)
