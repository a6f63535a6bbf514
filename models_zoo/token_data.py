"""Turns a file of text or tokens, or a generated language, into windows of token ids."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

Tokens = npt.NDArray[Any]  # one dimension, any integer type: a corpus keeps the type of its file

BYTE_VOCABULARY = 256
# The generated language is small, so that a small model learns it in seconds. Its loss per word is
# ln 64 = 4.2 nats at first, ln 8 = 2.1 once the model finds the topic, and ln 4 = 1.4 at best.
TOPICS = 8
TOPIC_WORDS = 8
SUCCESSORS = 4


class TokenWindows(Dataset[Tensor]):
    """Windows of `length` tokens of one stream; each starts on the last token of the one before."""

    def __init__(self, tokens: Tokens, length: int, vocab_size: int) -> None:
        if len(tokens) < length:
            raise ValueError(f"the data has {len(tokens)} tokens; one window needs {length}")
        self.tokens, self.length, self.vocab_size = tokens, length, vocab_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // (self.length - 1)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * (self.length - 1)
        window = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        # Checked here, not at the start: a corpus may be far larger than memory.
        if not 0 <= window.min() <= window.max() < self.vocab_size:
            raise ValueError(
                f"window {index} holds token {int(window.max())} (least {int(window.min())}); "
                f"the model knows 0 to {self.vocab_size - 1}"
            )
        return window


class NextToken(Dataset[dict[str, Tensor]]):
    """Rows of a causal language model: `labels[t]` is the token that follows `input_ids[t]`."""

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index]
        return {"input_ids": window[:-1], "labels": window[1:]}


def next_token_dataset(data: str | None, vocab_size: int, *, seq_len: int, items: int) -> NextToken:
    """Return the rows of the file `data`, or `items` rows of the generated language."""
    return NextToken(token_windows(data, vocab_size, length=seq_len + 1, items=items))


def token_windows(data: str | None, vocab_size: int, *, length: int, items: int) -> TokenWindows:
    """Return the windows of the file `data`, or `items` windows of the generated language."""
    if data is None:
        stream = generated_language(vocab_size, items, length - 1)  # a text per window
    else:
        stream = read_tokens(data, vocab_size)
    return TokenWindows(stream, length, vocab_size)


def read_tokens(path: str, vocab_size: int) -> Tokens:
    """Read `.npy` (any integers), `.bin` (uint16, as nanoGPT writes) or text (its UTF-8 bytes)."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected text, .npy or .bin tokens")
    if file.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    if file.suffix == ".npy":
        return read_npy(file)
    if file.suffix == ".bin":
        if file.stat().st_size % 2:
            raise ValueError(f"{path}: an odd number of bytes; expected tokens of two bytes each")
        return np.memmap(file, dtype=np.uint16, mode="r")
    if vocab_size < BYTE_VOCABULARY:
        raise ValueError(f"{path}: text is read as bytes, and vocab_size {vocab_size} is below 256")
    return np.memmap(file, dtype=np.uint8, mode="r")


def read_npy(file: Path) -> Tokens:
    """Map one row of integers, as `numpy.save` writes it, without reading it into memory."""
    try:
        tokens: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{file}: not an array that numpy.save wrote ({error})") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{file}: expected one row of integers, found {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


def generated_language(vocab_size: int, texts: int, length: int) -> Tokens:
    """Return `texts` texts of `length` words one after the other, and one word more.

    A text keeps to one topic. Each word has four possible successors in its topic, equally likely.
    """
    topics = min(TOPICS, vocab_size // TOPIC_WORDS)
    if topics == 0:
        raise ValueError(f"vocab_size {vocab_size} is too small; the generated language needs 8")
    random = np.random.default_rng(0)
    words = topics * TOPIC_WORDS
    shuffled = random.permuted(np.tile(np.arange(TOPIC_WORDS), (words, 1)), axis=1)
    first_of_topic = np.arange(words)[:, None] // TOPIC_WORDS * TOPIC_WORDS
    follows = first_of_topic + shuffled[:, :SUCCESSORS]
    written = np.empty((texts, length), dtype=np.int32)
    written[:, 0] = random.integers(words, size=texts)
    for place in range(1, length):
        choice = random.integers(SUCCESSORS, size=texts)
        written[:, place] = follows[written[:, place - 1], choice]
    return np.append(written.reshape(-1), written[0, 0])
