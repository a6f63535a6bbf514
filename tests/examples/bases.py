"""Leaves on the disk what examples start from: small models with a tokenizer, and their data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = "which bird sings in the rain a wren or two thrushes and no owl at all".split()  # noqa: SIM905
END, PAD = "<end>", "<pad>"
ROWS = 40
VISION, CLASSES = "test_vit", 3  # of timm
_SIZES = {
    "vocab_size": len(WORDS) + 2, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip


def language_model(folder: Path) -> Path:
    """Save a small decoder, whose embedding is its head as well."""
    torch.manual_seed(7)
    config = LlamaConfig(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return _with_tokenizer(folder)


def encoder(folder: Path) -> Path:
    """Save a small encoder without dropout."""
    torch.manual_seed(7)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(**_SIZES, **still)).save_pretrained(folder)
    return _with_tokenizer(folder)


def _with_tokenizer(folder: Path) -> Path:
    numbers = {word: number for number, word in enumerate((PAD, END, *WORDS))}
    words = Tokenizer(WordLevel(numbers, unk_token=END))
    words.pre_tokenizer = Whitespace()
    whole: Any = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=END, unk_token=END, pad_token=PAD
    )
    whole.save_pretrained(folder)
    return folder


def texts(path: Path, lengths: Mapping[str, int], *, classes: int = 0) -> Path:
    """Write lines of JSON with random texts of up to so many words, and with a label."""
    drawn = torch.Generator().manual_seed(3)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=drawn))

    rows: list[dict[str, Any]] = []
    for _ in range(ROWS):
        row: dict[str, Any] = {
            key: " ".join(WORDS[number(len(WORDS))] for _ in range(2 + number(length - 1)))
            for key, length in lengths.items()
        }
        rows.append(row | ({"label": number(classes)} if classes else {}))
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def vision_model(folder: Path) -> Path:
    """Save a small model of timm, with a head for other classes than are trained."""
    torch.manual_seed(7)
    model = import_module("timm").create_model(VISION, num_classes=5)
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file(model.state_dict(), path)
    return path


def images(folder: Path) -> Path:
    """Write images of noise, in a folder for each class."""
    drawn = np.random.default_rng(3)
    for number in range(ROWS):
        path = folder / f"class{number % CLASSES}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(256, size=(24, 24, 3), dtype=np.uint8)).save(path)
    return folder
