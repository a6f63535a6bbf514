"""The language model of PyTorch's tutorial, made of `nn.TransformerEncoderLayer`s.

Sizes: tiny, wikitext2. Data: text, split at spaces; the most frequent words are the vocabulary.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sizes import pick_size
from token_data import NextToken, Tokens, TokenWindows, next_token_dataset
from torch import Tensor, nn
from torch.utils.data import Dataset

UNKNOWN = "<unk>"  # stands for every word that is not in the vocabulary
END = "<eos>"  # stands for the end of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the language model."""

    layers: int = 2
    heads: int
    dim: int
    ffn: int
    seq_len: int = 35
    vocab_size: int
    dropout: float = 0.2


SIZES = {
    "tiny": Config(heads=4, dim=64, ffn=128, seq_len=32, vocab_size=256, dropout=0.1),
    "wikitext2": Config(heads=2, dim=200, ffn=200, vocab_size=33278),
}


def sinusoids(seq: int, like: Tensor) -> Tensor:
    """Return the positions [seq, dim] as sines and cosines of many wavelengths."""
    dim = like.shape[-1]
    position = torch.arange(seq, device=like.device).unsqueeze(1)
    even = torch.arange(0, dim, 2, device=like.device)
    angles = position * torch.exp(even * (-math.log(10000.0) / dim))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(like.dtype)


class TransformerLM(nn.Module):
    """Maps words to the logits of the words that follow them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.dim, config.heads, config.ffn, config.dropout, batch_first=True
            )
            for _ in range(config.layers)
        )
        self.decoder = nn.Linear(config.dim, config.vocab_size)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map [batch, seq] to [batch, seq, vocab]."""
        seq = input_ids.shape[1]
        x = self.embedding(input_ids)
        x = self.dropout(x * math.sqrt(x.shape[-1]) + sinusoids(seq, like=x))
        mask = nn.Transformer.generate_square_subsequent_mask(seq, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.decoder(x)


def read_words(path: str, vocab_size: int) -> Tokens:
    """Read a text as the numbers of its words; frequent words have low numbers."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a text")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text ({error})") from error
    words = [word for line in lines for word in (*line.split(), END)]
    counts = Counter(words)
    del counts[UNKNOWN]  # WikiText contains it as a word; it has number 0 here
    number = {word: 1 + place for place, (word, _) in enumerate(counts.most_common(vocab_size - 1))}
    return np.array([number.get(word, 0) for word in words], dtype=np.int64)


def build_model(
    size: str = "tiny",
    layers: int | None = None,
    vocab_size: int | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """Return a language model of a size, changed by the arguments that are not None."""
    return TransformerLM(
        pick_size(SIZES, size, layers=layers, vocab_size=vocab_size, dropout=dropout)
    )


def example_batch(
    batch_size: int, size: str = "tiny", seq_len: int | None = None, vocab_size: int | None = None
) -> dict[str, Tensor]:
    """Return random words."""
    config = pick_size(SIZES, size, seq_len=seq_len, vocab_size=vocab_size)
    words = torch.randint(config.vocab_size, (batch_size, config.seq_len + 1))
    return {"input_ids": words[:, :-1], "labels": words[:, 1:]}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per word, in nats."""
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def build_dataset(
    size: str = "tiny",
    data: str | None = None,
    items: int = 1024,
    seq_len: int | None = None,
    vocab_size: int | None = None,
) -> Dataset[dict[str, Tensor]]:
    """Return windows of the file `data`, or `items` windows of a generated language."""
    config = pick_size(SIZES, size, seq_len=seq_len, vocab_size=vocab_size)
    if data is None:
        return next_token_dataset(None, config.vocab_size, seq_len=config.seq_len, items=items)
    stream = read_words(data, config.vocab_size)
    return NextToken(TokenWindows(stream, config.seq_len + 1, config.vocab_size))
