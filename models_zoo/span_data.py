"""Turns windows of words into pairs for T5: a text with spans taken out, and these spans."""

import numpy as np
import torch
from token_data import TokenWindows
from torch import Tensor
from torch.utils.data import Dataset

END = 1  # T5's end of sentence
NOISE = 0.15  # the share of words that are taken out
SPAN = 3  # the mean number of words in a span


def noise_words(window: int) -> int:
    """Return how many words of a window are taken out."""
    return max(1, round(window * NOISE))


def spans(window: int) -> int:
    """Return how many spans are taken out of a window."""
    return max(1, round(noise_words(window) / SPAN))


def source_length(window: int) -> int:
    """Return an input's length: the words that stay, one sentinel per span, and the end."""
    return window - noise_words(window) + spans(window) + 1


def target_length(window: int) -> int:
    """Return a target's length: the words taken out, one sentinel per span, and the end."""
    return noise_words(window) + spans(window) + 1


class FilledSpans(Dataset[dict[str, Tensor]]):
    """Rows of a text with gaps, and the words that belong there; all rows have equal lengths."""

    def __init__(self, windows: TokenWindows, first_sentinel: int) -> None:
        self.windows, self.first_sentinel = windows, first_sentinel

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.windows[index].tolist()
        random = np.random.default_rng((3, index))
        gone = parts(noise_words(len(words)), spans(len(words)), random)
        kept = parts(len(words) - sum(gone), len(gone), random)
        source: list[int] = []
        target: list[int] = []
        start = 0
        for span, (stay, leave) in enumerate(zip(kept, gone, strict=True)):
            sentinel = self.first_sentinel - span
            source += [*words[start : start + stay], sentinel]
            target += [sentinel, *words[start + stay : start + stay + leave]]
            start += stay + leave
        return {
            "input_ids": torch.tensor([*source, END]),
            "labels": torch.tensor([*target, END]),
        }


def parts(total: int, count: int, random: np.random.Generator) -> list[int]:
    """Cut `total` into `count` parts of at least one, all cuts equally likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    return [int(part) for part in np.diff(cuts, prepend=0, append=total)]
