"""Puts together what the ranks of a script hold, and compares it with one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.codegen.proof.reference import Trained
from autopar.runtime.chunks import Chunks


@dataclass(frozen=True, slots=True)
class Block:
    """What a rank holds of a tensor, or a part of that."""

    name: str
    chunks: Chunks
    value: Tensor


Held: TypeAlias = Sequence[Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference among the tensors of one kind, and which one has it."""

    largest: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a script is from one process; `losses` are those of one process."""

    loss: Difference
    gradient: Difference
    parameter: Difference
    losses: tuple[float, ...]

    def is_within(self, tolerance: float) -> bool:
        """Whether nothing differs by more; what is not a number differs."""
        return all(d.largest <= tolerance for d in (self.loss, self.gradient, self.parameter))


def compared(found: Trained, expected: Trained) -> Comparison:
    """Return how far two trainings are apart."""
    losses = {
        f"step {step}": abs(a - b)
        for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True), start=1)
    }
    return Comparison(
        loss=_largest(losses),
        gradient=_largest(_apart(found.gradients, expected.gradients)),
        parameter=_largest(_apart(found.parameters, expected.parameters)),
        losses=expected.losses,
    )


def assembled(ranks: Iterable[Held]) -> dict[str, Tensor]:
    """Put what the ranks hold together to whole tensors; what nobody holds is not a number."""
    whole: dict[str, Tensor] = {}
    for held in ranks:
        for block in held:
            shape = block.chunks.global_shape
            full = whole.setdefault(block.name, torch.full(shape, torch.nan).double())
            _place(full, block.chunks, block.value)
    return whole


def _apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the differences by name; what is missing differs by infinity."""
    return {
        name: (found[name] - value).abs().max().item() if name in found else float("inf")
        for name, value in expected.items()
        if value.numel()
    }


def _largest(differences: Mapping[str, float]) -> Difference:
    if not differences:
        return Difference(largest=0.0, name="")
    # Not a number is worse than any number.
    name = max(differences, key=lambda n: (differences[n] != differences[n], differences[n]))
    return Difference(largest=differences[name], name=name)


def _place(full: Tensor, chunks: Chunks, value: Tensor) -> None:
    """Lay each block of a shard where it belongs."""
    for block in product(*(_with_offsets(ranges) for ranges in chunks.ranges)):
        target = tuple(slice(low, high) for low, high, _ in block)
        source = tuple(slice(offset, offset + high - low) for low, high, offset in block)
        full[target] = value[source]


def _with_offsets(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    found, offset = [], 0
    for low, high in ranges:
        found.append((low, high, offset))
        offset += high - low
    return found
