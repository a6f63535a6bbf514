"""GPT-2 (Radford et al. 2019) as nanoGPT writes it, and the shape of GPT-3 (Brown et al. 2020).

Sizes: tiny, 124m, 355m, 774m, 1.5b, 175b (GPT-3). Data: text, or tokens in .npy or .bin files.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sizes import pick_size
from token_data import next_token_dataset
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of a GPT-2."""

    layers: int
    heads: int
    dim: int
    seq_len: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.1
    kv_heads: int | None = None  # None: as many as heads
    ffn: int | None = None  # None: four times dim
    tied: bool = True


SIZES = {
    "tiny": Config(layers=2, heads=4, dim=64, seq_len=64, vocab_size=256),
    "124m": Config(layers=12, heads=12, dim=768),
    "355m": Config(layers=24, heads=16, dim=1024),
    "774m": Config(layers=36, heads=20, dim=1280),
    "1.5b": Config(layers=48, heads=25, dim=1600),
    "175b": Config(layers=96, heads=96, dim=12288, seq_len=2048),
}


class SelfAttention(nn.Module):
    """Causal self-attention with query, key and value in one matrix."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        shared = (config.kv_heads or config.heads) * self.head_dim
        self.widths = (config.dim, shared, shared)  # of query, key and value
        self.c_attn = nn.Linear(config.dim, sum(self.widths))
        self.c_proj = nn.Linear(config.dim, config.dim)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        batch, seq, _ = x.shape
        q, k, v = (
            part.view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for part in self.c_attn(x).split(self.widths, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=k.shape != q.shape
        )
        y = self.c_proj(y.transpose(1, 2).reshape(batch, seq, -1))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """The feed-forward half of a block; its inner width is `ffn`, or else four times `dim`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        ffn = config.ffn or 4 * config.dim
        self.c_fc = nn.Linear(config.dim, ffn)
        self.c_proj = nn.Linear(ffn, config.dim)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        y = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Maps tokens to the logits of the tokens that follow them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.seq_len, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.wte.weight  # one table embeds tokens and makes logits
        self.init_weights(config.layers)

    def init_weights(self, layers: int) -> None:
        """Draw weights as GPT-2 does: deviation 0.02, but less where a block adds to its input."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map [batch, seq] to [batch, seq, vocab]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def build_model(
    size: str = "tiny",
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    dim: int | None = None,
    ffn: int | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    dropout: float | None = None,
    tied: bool | None = None,
) -> nn.Module:
    """Return a GPT-2 of a published size, changed by the arguments that are not None."""
    return GPT2(
        pick_size(
            SIZES,
            size,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            ffn=ffn,
            seq_len=seq_len,
            vocab_size=vocab_size,
            dropout=dropout,
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


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per token, in nats."""
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
    return next_token_dataset(data, config.vocab_size, seq_len=config.seq_len, items=items)


def build_optimizer(params: Iterable[nn.Parameter], learning_rate: float = 1e-3) -> Optimizer:
    """Return AdamW with weight decay for matrices, but not for biases and norms."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def build_scheduler(optimizer: Optimizer, warmup: int = 10, steps: int = 1000) -> LambdaLR:
    """Return a linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        progress = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        warm = min(1.0, (step + 1) / max(1, warmup))
        return warm * (0.55 + 0.45 * math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
