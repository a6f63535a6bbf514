"""Gives a size to what depends on numbers, of which a dry run has none: entries that masks pick.

A mask picks the share of its entries that the plan expects, of which a dry run is told by
AUTOPAR_DRYRUN_PICKED: pairs of how many entries a mask has and the share; others pick all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_impls

PICKED = "AUTOPAR_DRYRUN_PICKED"

_ATEN = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def expected_entries(mask: Tensor) -> int:
    """Return how many entries of a mask are taken for true."""
    shares: Mapping[int, float] = dict(json.loads(os.environ.get(PICKED, "[]")))
    return ceil(mask.numel() * shares.get(mask.numel(), 1.0))


def _nonzero(mode: Any, _op: Any, mask: Tensor) -> Tensor:
    with mode:
        return mask.new_empty((expected_entries(mask), mask.dim()), dtype=torch.int64)


def _masked_select(mode: Any, _op: Any, values: Tensor, mask: Tensor) -> Tensor:
    with mode:
        whole = torch.logical_or(mask, torch.empty_like(values, dtype=torch.bool))
        return values.new_empty(ceil(expected_entries(mask) * whole.numel() / mask.numel()))


def _index(mode: Any, op: Any, values: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    with mode:
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in _MASKS:
                places += index.nonzero().unbind(1)
            else:
                places.append(index)
    made: Tensor = _INDEX(mode, op, values, places)
    return made


def _grouped_mm(
    mode: Any,
    _op: Any,
    rows: Tensor,
    matrices: Tensor,
    offs: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """torch has the shapes for bfloat16 alone, kernels take other types."""
    groups = () if rows.dim() + matrices.dim() == 5 else (_groups(rows, offs),)
    with mode:
        return rows.new_empty((*groups, rows.shape[-2], matrices.shape[-1]))


def _groups(rows: Tensor, offs: Tensor | None) -> int:
    return rows.shape[0] if offs is None else offs.numel()


_INDEX = fake_impls.op_implementations_dict[_ATEN.index.Tensor]
_SIZED = {
    _ATEN.nonzero.default: _nonzero,
    _ATEN.masked_select.default: _masked_select,
    _ATEN.index.Tensor: _index,
    _ATEN._grouped_mm.default: _grouped_mm,
}


@contextmanager
def sizes_of_numbers() -> Iterator[None]:
    """Let fake tensors have these sizes."""
    with patch.dict(fake_impls.op_implementations_dict, _SIZED):
        yield
