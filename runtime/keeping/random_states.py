"""Turns the generators that a training draws from into bytes, and back."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

RANDOM = "random/"


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators, Python's and numpy's."""
    numpy = sys.modules.get("numpy")
    others = [random.getstate()]
    if numpy:
        kind, words, *rest = numpy.random.get_state()
        others.append((kind, words.tolist(), *rest))
    text = json.dumps(others).encode()
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return {RANDOM + name: state for name, state in found.items()}


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put the generators back to states that have been kept."""
    torch.set_rng_state(states[RANDOM + "torch"])
    if device.type == "cuda" and RANDOM + "cuda" in states:
        torch.cuda.set_rng_state(states[RANDOM + "cuda"], device)
    python, *others = json.loads(bytes(states[RANDOM + "python"].tolist()))
    version, words, gauss = python
    random.setstate((version, tuple(words), gauss))
    if others and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(others[0]))
