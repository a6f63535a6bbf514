"""Models whose rows are 32, 57 and 128 long, as the model file of a user has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

LENGTHS = (32, 57, 128)
IMAGE = (3, 16, 16)
FRAME = 8
WORDS = 64
_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "use_cache": False}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_NOT_DROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Block(nn.Module):
    """A block as many write it, with the length of the rows as a number."""

    mask: Tensor

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        mask = torch.tril(torch.ones(128, 128)).view(1, 1, 128, 128)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(self.norm(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = (functional.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.out(y)
        made: Tensor = x + self.down(functional.gelu(self.up(x)))
        return made


class Waves(nn.Module):
    """Adds waves to a sequence, of which a tensor rank may have a shard: its code sees no other."""

    table: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        angles = torch.arange(128).unsqueeze(1) / 10.0 ** (torch.arange(width) * 4 / width)
        self.register_buffer("table", angles.sin().unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        waves = (x + self.table[:, : x.size(1)]).flatten(0, 1)
        return torch.unflatten(waves.tanh(), 0, x.shape[:2])


class NanoGPT(nn.Module):
    """Counts positions up to the length of the rows, of which it has 128."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, 32), nn.Embedding(128, 32)
        self.waves = Waves()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        t = input_ids.shape[1]
        assert t <= 128
        x = self.tokens(input_ids) + self.positions(
            torch.arange(0, t, dtype=torch.long, device=input_ids.device)
        )
        x = self.waves(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1]
        return functional.cross_entropy(
            logits.reshape(-1, WORDS), labels[:, 1:].reshape(-1), ignore_index=-100
        )


class Listener(nn.Module):
    """Reads sound: a convolution that looks back makes one place of each two frames, rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(FRAME, 32, kernel_size=3, stride=2)
        self.places = nn.Embedding(128, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, WORDS, bias=False)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(functional.pad(frames.transpose(1, 2), (2, 0))).transpose(1, 2)
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, ::2].flatten())


def _captioner() -> nn.Module:
    seen = ViTConfig(**_BERT, intermediate_size=64, image_size=16, patch_size=8, **_NOT_DROPPED)
    said = GPT2Config(**_GPT2, **_NO_DROPOUT, add_cross_attention=True)
    both = VisionEncoderDecoderConfig.from_encoder_decoder_configs(seen, said)
    both.decoder_start_token_id, both.pad_token_id = 1, 0
    both.use_cache = False
    model: nn.Module = VisionEncoderDecoderModel(config=both)
    return model


_KINDS: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": NanoGPT,
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2, **_NO_DROPOUT)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=WORDS, use_cache=False,
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=WORDS,
            dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        )
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(**_BERT, intermediate_size=64, vocab_size=WORDS, **_NOT_DROPPED)
    ),
    "captioner": _captioner,
    "listener": Listener,
}  # fmt: skip


def build_model(kind: str) -> nn.Module:
    """Return a model that returns its loss."""
    return _KINDS[kind]()


def example_batch(batch_size: int, kind: str) -> dict[str, Tensor]:
    """Return rows that are all as long as the planner thinks."""
    length = 128 if kind == "nanogpt" else 32
    batch = build_collate(kind)([_row(i, length, length // 2, kind) for i in range(batch_size)])
    assert batch["labels"].shape[0] == batch_size
    return batch


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of three lengths, in no order."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = LENGTHS[index % 3]
        return _row(index, length, 20 + 9 * (index % 2), self.kind)


def build_dataset(kind: str) -> Dataset[dict[str, Tensor]]:
    """Return the rows."""
    return Rows(kind)


def _row(index: int, length: int, target_length: int, kind: str) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(index)
    ids = torch.randint(2, WORDS, (length,), generator=numbers)
    if kind == "captioner":
        return {"pixel_values": torch.randn(IMAGE, generator=numbers), "labels": ids}
    if kind == "listener":
        frames = torch.randn(length, FRAME, generator=numbers)
        return {"frames": frames, "labels": ids}
    if kind == "t5":
        target = torch.randint(2, WORDS, (target_length,), generator=numbers)
        return {"input_ids": ids, "labels": target}
    return {"input_ids": ids, "labels": ids}


def build_collate(kind: str) -> Callable[[list[dict[str, Tensor]]], dict[str, Any]]:
    """Return what pads rows to the longest of them."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        labels = _padded([row["labels"] for row in rows], -100)
        if kind == "captioner":
            return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]),
                    "labels": labels}  # fmt: skip
        if kind == "listener":
            return {"frames": _padded([row["frames"] for row in rows], 0), "labels": labels}
        ids = [row["input_ids"] for row in rows]
        batch = {"input_ids": _padded(ids, 0), "labels": labels}
        if kind not in ("nanogpt", "llama"):
            batch["attention_mask"] = _padded([torch.ones_like(row) for row in ids], 0)
        return batch

    return collate


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)
