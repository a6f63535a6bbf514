"""T5 v1.0 (Raffel et al. 2019), encoder and decoder, trained to fill in spans; it returns its loss.

Sizes: tiny, small, base, large, 3b, 11b. Data: text, or tokens in .npy or .bin files.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sizes import pick_size
from span_data import FilledSpans, source_length, target_length
from token_data import token_windows
from torch import Tensor, nn
from torch.utils.data import Dataset

BUCKETS = 32  # the number of classes of distances
FARTHEST = 128  # longer distances share the last class
START = 0  # the token that the decoder reads first; it is the padding token too
SENTINELS = 100  # the highest tokens stand for spans that were taken out


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a T5; `seq_len` counts the words before spans are taken out."""

    layers: int  # of each stack
    heads: int
    head_dim: int = 64
    dim: int
    ffn: int
    seq_len: int = 568  # becomes an input of 512 words and a target of 114
    vocab_size: int = 32128
    dropout: float = 0.1


SIZES = {
    "tiny": Config(layers=2, heads=4, head_dim=16, dim=64, ffn=128, seq_len=64, vocab_size=360),
    "small": Config(layers=6, heads=8, dim=512, ffn=2048),
    "base": Config(layers=12, heads=12, dim=768, ffn=3072),
    "large": Config(layers=24, heads=16, dim=1024, ffn=4096),
    "3b": Config(layers=24, heads=32, head_dim=128, dim=1024, ffn=16384),
    "11b": Config(layers=24, heads=128, head_dim=128, dim=1024, ffn=65536),
}


class Attention(nn.Module):
    """Attention without biases; its initial weights contain the usual scaling of scores."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        inner = config.heads * config.head_dim
        self.q = nn.Linear(config.dim, inner, bias=False)
        self.k = nn.Linear(config.dim, inner, bias=False)
        self.v = nn.Linear(config.dim, inner, bias=False)
        self.o = nn.Linear(inner, config.dim, bias=False)
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        nn.init.normal_(self.q.weight, std=(config.dim * config.head_dim) ** -0.5)
        nn.init.normal_(self.k.weight, std=config.dim**-0.5)
        nn.init.normal_(self.v.weight, std=config.dim**-0.5)
        nn.init.normal_(self.o.weight, std=inner**-0.5)

    def heads(self, x: Tensor) -> Tensor:
        """Map [batch, seq, heads · head_dim] to [batch, heads, seq, head_dim]."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, bias: Tensor | None) -> Tensor:
        """Map [batch, seq, dim] to the same shape, reading from [batch, other, dim]."""
        q, k, v = self.heads(self.q(x)), self.heads(self.k(context)), self.heads(self.v(context))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return self.o(y.transpose(1, 2).flatten(2))


class RelativeBias(nn.Module):
    """A score per head and class of distances, added in attention: T5's only use of positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bias = nn.Embedding(BUCKETS, config.heads)
        nn.init.normal_(self.bias.weight, std=config.dim**-0.5)

    def forward(self, buckets: Tensor) -> Tensor:
        """Map [seq, seq] to [1, heads, seq, seq]."""
        bias: Tensor = self.bias(buckets)
        return bias.permute(2, 0, 1).unsqueeze(0)


def distances(seq: int, device: torch.device) -> Tensor:
    """Return how far each key [column] lies ahead of each query [row]."""
    positions = torch.arange(seq, device=device)
    return positions[None, :] - positions[:, None]


def buckets_of(distance: Tensor, buckets: int) -> Tensor:
    """Return the class of each distance of zero or more: exact when near, logarithmic when far."""
    exact = buckets // 2
    ratio = distance.clamp(min=exact).float() / exact
    far = exact + (ratio.log() / math.log(FARTHEST / exact) * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class FeedForward(nn.Module):
    """Two matrices with ReLU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wi = nn.Linear(config.dim, config.ffn, bias=False)
        self.wo = nn.Linear(config.ffn, config.dim, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.wi.weight, std=config.dim**-0.5)
        nn.init.normal_(self.wo.weight, std=config.ffn**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        return self.wo(self.dropout(F.relu(self.wi(x))))


class EncoderBlock(nn.Module):
    """Self-attention, then the feed-forward layer; the first block makes the bias for all."""

    def __init__(self, config: Config, *, first: bool) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.relative = RelativeBias(config) if first else None
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map [batch, seq, dim] to the same shape; also return the bias for the next block."""
        if self.relative is not None:
            ahead = distances(x.shape[1], x.device)
            half = BUCKETS // 2  # one half for keys before the query, one for keys after it
            bias = self.relative(buckets_of(ahead.abs(), half) + half * (ahead > 0))
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, y, bias))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x, bias


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoded words, then the feed-forward layer."""

    def __init__(self, config: Config, *, first: bool) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.relative = RelativeBias(config) if first else None
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.cross = Attention(config)
        self.cross_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, bias: Tensor | None, encoded: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Map [batch, seq, dim] to the same shape; also return the bias for the next block."""
        if self.relative is not None:
            ahead = distances(x.shape[1], x.device)
            likes: Tensor = self.relative(buckets_of((-ahead).clamp(min=0), BUCKETS))
            bias = likes.masked_fill(ahead > 0, -math.inf)
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, y, bias))
        x = x + self.dropout(self.cross(self.cross_norm(x), encoded, None))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x, bias


class T5(nn.Module):
    """Maps input words and target words to the mean loss of the target words."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        firsts = [layer == 0 for layer in range(config.layers)]
        self.shared = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = nn.ModuleList(EncoderBlock(config, first=first) for first in firsts)
        self.encoder_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.decoder = nn.ModuleList(DecoderBlock(config, first=first) for first in firsts)
        self.decoder_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def encode(self, input_ids: Tensor) -> Tensor:
        """Map [batch, source] to [batch, source, dim]."""
        x, bias = self.dropout(self.shared(input_ids)), None
        for block in self.encoder:
            x, bias = block(x, bias)
        return self.dropout(self.encoder_norm(x))

    def logits(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Map [batch, source] and [batch, target] to [batch, target, vocab]."""
        encoded = self.encode(input_ids)
        before = F.pad(labels[:, :-1], (1, 0), value=START)
        x, bias = self.dropout(self.shared(before)), None
        for block in self.decoder:
            x, bias = block(x, bias, encoded)
        x = self.dropout(self.decoder_norm(x))
        # The embedding table has unit variance, which would make the logits too large.
        return F.linear(x * x.shape[-1] ** -0.5, self.shared.weight)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy per word, in nats."""
        return F.cross_entropy(self.logits(input_ids, labels).flatten(0, 1), labels.flatten())


def build_model(
    size: str = "tiny",
    layers: int | None = None,
    vocab_size: int | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """Return a T5 of a published size, changed by the arguments that are not None."""
    return T5(pick_size(SIZES, size, layers=layers, vocab_size=vocab_size, dropout=dropout))


def example_batch(
    batch_size: int, size: str = "tiny", seq_len: int | None = None, vocab_size: int | None = None
) -> dict[str, Tensor]:
    """Return random words."""
    config = pick_size(SIZES, size, seq_len=seq_len, vocab_size=vocab_size)
    source, target = source_length(config.seq_len), target_length(config.seq_len)
    return {
        "input_ids": torch.randint(config.vocab_size, (batch_size, source)),
        "labels": torch.randint(config.vocab_size, (batch_size, target)),
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
    words = config.vocab_size - SENTINELS
    windows = token_windows(data, words, length=config.seq_len, items=items)
    return FilledSpans(windows, first_sentinel=config.vocab_size - 1)
