"""Reads JSON lines with texts, and turns the texts into tokens padded to one length."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoTokenizer

IGNORED = -100  # the label of prompts and of padding: losses leave these tokens out


class Lines(Dataset[dict[str, Tensor]]):
    """The lines of a file; each has its texts under `keys`."""

    def __init__(self, path: str, base: str, length: int, keys: tuple[str, ...]) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.length, self.keys = length, keys

    def __len__(self) -> int:
        return len(self.rows)


class Answers(Lines):
    """Prompts, each with one answer or several."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        found = [self.tokens(row["prompt"], row[key]) for key in self.keys]
        ids, labels = (torch.tensor(one) for one in zip(*found, strict=True))
        return {"input_ids": ids.squeeze(0), "labels": labels.squeeze(0)}

    def tokens(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Return tokens and labels. Padding needs no mask: causal attention does not look ahead."""
        asked = self.tokenizer(prompt)["input_ids"]
        given = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        ids = [*asked, *given, end][: self.length]
        labels = ([IGNORED] * len(asked) + ids[len(asked) :])[: self.length]
        padding = self.length - len(ids)
        return ids + [end] * padding, labels + [IGNORED] * padding


class Texts(Lines):
    """Texts, each with a mask of its tokens, and the label of their line, if it has one."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        found = {"label": torch.tensor(row["label"])} if "label" in row else {}
        for key in self.keys:
            tokens = self.tokenizer(
                row[key], padding="max_length", truncation=True, max_length=self.length
            )
            found[f"{key}_ids"] = torch.tensor(tokens["input_ids"])
            found[f"{key}_mask"] = torch.tensor(tokens["attention_mask"])
        return found


def random_tokens(base: str, *shape: int) -> Tensor:
    """Return random tokens of a model's vocabulary."""
    size = AutoConfig.from_pretrained(base).get_text_config().vocab_size
    return torch.randint(size, shape)
