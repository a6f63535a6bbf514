"""BERT (Devlin et al. 2018) trained to restore masked words in padded rows; it returns its loss.

Sizes: tiny, base, large. Data: text, or tokens in .npy or .bin files.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sizes import pick_size
from token_data import TokenWindows, token_windows
from torch import Tensor, nn
from torch.utils.data import Dataset

PAD = 0
IGNORED = -100  # the label of a word that was not masked, and of padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a BERT; its last token is [MASK]."""

    layers: int
    heads: int
    dim: int
    seq_len: int = 512
    vocab_size: int = 30522
    dropout: float = 0.1


SIZES = {
    "tiny": Config(layers=2, heads=4, dim=64, seq_len=64, vocab_size=260),
    "base": Config(layers=12, heads=12, dim=768),
    "large": Config(layers=24, heads=16, dim=1024),
}


class Embeddings(nn.Module):
    """Adds up the embeddings of each word, of its position and of its sentence (one of two)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.seq_len, config.dim)
        self.sentence = nn.Embedding(2, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Map two [batch, seq] to [batch, seq, dim]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word(input_ids) + self.position(positions) + self.sentence(token_type_ids)
        return self.dropout(self.norm(x))


class Attention(nn.Module):
    """Self-attention of every word to every word that is not padding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.output = nn.Linear(config.dim, config.dim)
        self.head_dim = config.dim // config.heads
        self.dropout = config.dropout

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape; `visible` is [batch, 1, 1, seq]."""
        batch, seq, _ = x.shape
        q, k, v = (
            projection(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout)
        return self.output(y.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    """A post-norm block: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.dim, eps=1e-12)
        self.wide = nn.Linear(config.dim, 4 * config.dim)
        self.narrow = nn.Linear(4 * config.dim, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        x = self.attention_norm(x + self.dropout(self.attention(x, visible)))
        return self.mlp_norm(x + self.dropout(self.narrow(F.gelu(self.wide(x)))))


class Bert(nn.Module):
    """Maps rows with masked words, and those words, to the mean loss over the masked words."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.transform = nn.Linear(config.dim, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=1e-12)
        self.apply(init_weights)

    def logits(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Map three [batch, seq] to [batch, seq, vocab]."""
        visible = attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input_ids, token_type_ids)
        for block in self.layers:
            x = block(x, visible)
        x = self.norm(F.gelu(self.transform(x)))
        return F.linear(x, self.embeddings.word.weight, self.bias)  # tied to the embedding

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the mean cross-entropy per masked word, in nats."""
        logits = self.logits(input_ids, attention_mask, token_type_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def init_weights(module: nn.Module) -> None:
    """Draw matrices with deviation 0.02 and start biases at zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class MaskedWords(Dataset[dict[str, Tensor]]):
    """Rows of two sentences and padding in which 15 % of the words are to be restored."""

    def __init__(self, windows: TokenWindows, mask: int) -> None:
        self.windows, self.mask = windows, mask

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.windows[index]
        random = np.random.default_rng((2, index))
        places = torch.arange(len(words))
        length = int(random.integers(3 * len(words) // 4, len(words) + 1))
        chance = torch.from_numpy(random.random(len(words)))
        chance[random.integers(length)] = 0.0  # the loss needs at least one masked word
        # 12 % become [MASK], 1.5 % another word, 1.5 % stay: the model must doubt every word.
        chosen = (chance < 0.15) & (places < length)
        others = torch.from_numpy(random.integers(self.mask, size=len(words)))
        shown = words.where(chance >= 0.135, others).where(chance >= 0.12, self.mask)
        return {
            "input_ids": shown.where(places < length, PAD),
            "attention_mask": (places < length).long(),
            "token_type_ids": ((places >= length // 2) & (places < length)).long(),
            "labels": words.where(chosen, IGNORED),
        }


def build_model(
    size: str = "tiny",
    layers: int | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """Return a BERT of a published size, changed by the arguments that are not None."""
    return Bert(
        pick_size(
            SIZES, size, layers=layers, seq_len=seq_len, vocab_size=vocab_size, dropout=dropout
        )
    )


def example_batch(
    batch_size: int, size: str = "tiny", seq_len: int | None = None, vocab_size: int | None = None
) -> dict[str, Tensor]:
    """Return random words; the last quarter is padding, and every seventh is to be restored."""
    config = pick_size(SIZES, size, seq_len=seq_len, vocab_size=vocab_size)
    words = torch.randint(config.vocab_size, (batch_size, config.seq_len))
    places = torch.arange(config.seq_len).expand(batch_size, -1)
    padded = places >= 3 * config.seq_len // 4
    return {
        "input_ids": words.masked_fill(padded, PAD),
        "attention_mask": (~padded).long(),
        "token_type_ids": torch.zeros_like(words),
        "labels": words.masked_fill(padded | (places % 7 > 0), IGNORED),
    }


def build_dataset(
    size: str = "tiny",
    data: str | None = None,
    items: int = 1024,
    seq_len: int | None = None,
    vocab_size: int | None = None,
) -> Dataset[dict[str, Tensor]]:
    """Return rows of the file `data`, or `items` rows of a generated language."""
    config = pick_size(SIZES, size, seq_len=seq_len, vocab_size=vocab_size)
    mask = config.vocab_size - 1
    return MaskedWords(token_windows(data, mask, length=config.seq_len, items=items), mask)
