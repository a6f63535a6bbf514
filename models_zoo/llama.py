"""Llama 3 (Meta 2024): rotary positions, RMSNorm, SwiGLU, grouped queries; it returns its loss.

Sizes: tiny, 1b (Llama 3.2, tied), 8b, 70b, 405b. Data: text, or tokens in .npy or .bin files.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sizes import pick_size
from token_data import next_token_dataset
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a Llama 3."""

    layers: int
    heads: int
    kv_heads: int = 8
    dim: int
    ffn: int
    seq_len: int = 8192
    vocab_size: int = 128256
    tied: bool = False
    rope_theta: float = 500000.0

    @property
    def head_dim(self) -> int:
        """The channels of a head."""
        return self.dim // self.heads


SIZES = {
    "tiny": Config(layers=2, heads=4, kv_heads=2, dim=64, ffn=192, seq_len=64, vocab_size=256),
    "1b": Config(layers=16, heads=32, dim=2048, ffn=8192, tied=True),
    "8b": Config(layers=32, heads=32, dim=4096, ffn=14336),
    "70b": Config(layers=80, heads=64, dim=8192, ffn=28672),
    "405b": Config(layers=126, heads=128, dim=16384, ffn=53248),
}


def rotary_table(seq: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine [seq, head_dim] of the angle of each position and channel."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device)
    positions = torch.arange(seq, dtype=torch.float32, device=like.device)
    angles = torch.outer(positions, theta ** (-channels / head_dim))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + head_dim / 2) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        batch, seq, _ = x.shape
        q, k, v = (
            projection(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """SwiGLU: the gate decides for each channel how much of the other projection passes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=1e-5)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Maps tokens, and the tokens that follow them, to the mean loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Map [batch, seq] to [batch, seq, vocab]."""
        x: Tensor = self.embed_tokens(input_ids)
        # Not a buffer: a model that was built on the meta device would find it empty.
        cos, sin = rotary_table(input_ids.shape[1], self.head_dim, self.rope_theta, like=x)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy per token, in nats."""
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten())


def build_model(
    size: str = "tiny",
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    dim: int | None = None,
    ffn: int | None = None,
    vocab_size: int | None = None,
    tied: bool | None = None,
) -> nn.Module:
    """Return a Llama of a published size, changed by the arguments that are not None."""
    return Llama(
        pick_size(
            SIZES,
            size,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            ffn=ffn,
            vocab_size=vocab_size,
            tied=tied,
        )
    )


def example_batch(
    batch_size: int, size: str = "tiny", seq_len: int | None = None, vocab_size: int | None = None
) -> dict[str, Tensor]:
    """Return random tokens."""
    config = pick_size(SIZES, size, seq_len=seq_len, vocab_size=vocab_size)
    tokens = torch.randint(config.vocab_size, (batch_size, config.seq_len + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def build_dataset(
    size: str = "tiny",
    data: str | None = None,
    items: int = 1024,
    seq_len: int | None = None,
    vocab_size: int | None = None,
) -> Dataset[dict[str, Tensor]]:
    """Return windows of the file `data`, or `items` windows of a generated language."""
    config = pick_size(SIZES, size, seq_len=seq_len, vocab_size=vocab_size)
    return next_token_dataset(data, config.vocab_size, seq_len=config.seq_len, items=items)
