"""Finds what an export of the whole model has: names, tied ones among them, and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autopar.runtime.keeping.holdings import named_tensors
from autopar.runtime.keeping.manifest import Exported
from autopar.runtime.keeping.owners import every_rank
from autopar.runtime.ranks.mesh import Mesh


def exported_of(
    parts: Sequence[nn.Module], built: Mapping[str, torch.dtype], mesh: Mesh
) -> Mapping[str, Exported]:
    """Return what a state dict of the whole model has, of all ranks, by the first names.

    A weight stands in a file under its first name, as Hugging Face and safetensors have it. `built`
    are the types that the constructor chose.
    """
    here = [
        (one.names, built.get(one.names[0], one.place.tensor.dtype))
        for one in named_tensors(parts)
        if one.is_parameter or one.is_persistent
    ]
    found: dict[str, tuple[torch.dtype, set[str]]] = {}
    for names, dtype in (one for rank in every_rank(here, mesh) for one in rank):
        _, aliases = found.setdefault(names[0], (dtype, set()))
        aliases.update(names[1:])
    return {
        name: Exported(dtype=dtype, aliases=tuple(sorted(aliases)))
        for name, (dtype, aliases) in sorted(found.items())
    }


def export_dtype(held: torch.dtype, built: torch.dtype) -> torch.dtype:
    """Return the type to export: that of the constructor, but for a training in float64.

    That is trained to be compared to the last digits.
    """
    is_exact = held is torch.float64
    return held if is_exact or not built.is_floating_point else built


def tied_names(exported: Mapping[str, Exported]) -> Mapping[str, str]:
    """Return other names of tied weights, each with the first."""
    return {alias: name for name, one in exported.items() for alias in one.aliases}
