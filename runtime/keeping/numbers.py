"""Finds parameters that are no numbers: nan, or infinite where they learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.runtime.keeping.holdings import named_tensors
from autopar.runtime.optimizer.pieces import local_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """How many parameters of a rank hold nan or inf, and the first of them in the model's order."""

    count: int
    every: int
    first: str


@torch.no_grad()
def broken_of(parts: Sequence[nn.Module]) -> Broken:
    """Look through the parameters of this rank, in one pass of its memory."""
    named = [
        (one.names[0], local_tensor(one.place.tensor.detach()), one.place.tensor.requires_grad)
        for one in named_tensors(parts)
        if one.is_parameter and one.place.tensor.is_floating_point()
    ]
    held = [one for one in named if one[1].numel()]
    if not held:
        return Broken(count=0, every=0, first="")
    norms = torch._foreach_norm([tensor for _, tensor, _ in held], math.inf)
    largest = torch.stack([one.float() for one in norms]).tolist()
    names = [
        name
        for (name, _, learns), norm in zip(held, largest, strict=True)
        if not math.isfinite(norm) and (learns or math.isnan(norm))  # a frozen mask has -inf
    ]
    return Broken(count=len(names), every=len(held), first=names[0] if names else "")


def told_broken(ranks: Sequence[Broken]) -> str:
    """Say which rank's parameters are no numbers, the first rank that has such."""
    for rank, one in enumerate(ranks):
        if one.count:
            return (
                f"{one.count} of {one.every} parameters of rank {rank} are no numbers, "
                f"such as {one.first}"
            )
    return "all parameters are numbers"
