"""Makes sure that a constructor does the same in every process: each rank makes a part of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._guards import detect_fake_mode

from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.transport import gathered


def check_same(digests: Mapping[str, int], mesh: Mesh) -> None:
    """Refuse weights that begin otherwise in some process, by the name of one."""
    if detect_fake_mode() is not None:  # a dry run is one process
        return
    for axis in (mesh.data, mesh.tensor, mesh.pipeline):
        if axis.size > 1:
            _check_along(axis, digests, mesh.device)


def _check_along(axis: Axis, digests: Mapping[str, int], device: torch.device) -> None:
    names = sorted(digests)
    together = mixed_seed(*(digests[name] for name in names), len(names))
    if not _differ([together], axis, device):
        return
    if _differ([len(names)], axis, device):
        _refuse("their numbers differ")
    differing = _differ([digests[name] for name in names], axis, device)
    _refuse(", ".join(names[place] for place in differing[:3]) + " differ")


def _differ(numbers: list[int], axis: Axis, device: torch.device) -> list[int]:
    """Return the places of numbers in which the ranks of an axis differ."""
    own = torch.tensor(numbers, device=device)
    is_same = (gathered(own, axis) == own).all(0).tolist()
    return [place for place, same in enumerate(is_same) if not same]


def _refuse(found: str) -> None:
    refuse(
        f"build_model makes other weights in each process: {found}",
        fix="seed what it draws from (numpy.random.default_rng(0)), and let no order depend on the "
        "process: sorted(…) around a set; all processes must read the same files",
    )
