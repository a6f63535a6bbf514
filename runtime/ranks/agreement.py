"""Makes sure that ranks which share a dataset, or train on the same rows, have the same."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.transport import gathered


def agreed(
    batches: Iterator[dict[str, Tensor]], sharers: Iterable[Axis], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield batches, after the ranks that share rows have told that the first one is the same.

    Pipeline ranks read a row's inputs here and its targets there, tensor ranks share its work: a
    dataset that drew other numbers on each of them would train them on rows that do not exist.
    """
    first = next(batches)
    for axis in sharers:
        _check(first, axis, device)
    yield first
    yield from batches


def check_same_length(rows: int, maker: str, mesh: Mesh) -> None:
    """Leave where ranks have datasets of unlike lengths: they share out the rows of one."""
    if mesh.world.size == 1:
        return
    own = torch.tensor([rows], device=mesh.device)
    every: list[int] = gathered(own, mesh.world).flatten().tolist()
    for rank, other in enumerate(every):
        if other != every[0]:
            refuse(
                f"{maker}() returns {every[0]:,} rows on rank 0 and {other:,} on rank {rank}",
                fix="let it return the same rows on all ranks: each takes its own share of them",
            )


def _check(batch: Mapping[str, Tensor], axis: Axis, device: torch.device) -> None:
    if axis.size == 1:
        return
    own = torch.tensor([_digest(value) for value in batch.values()], device=device)
    is_same = (gathered(own, axis) == own).all(0).tolist()
    others = [repr(key) for key, same in zip(batch, is_same, strict=True) if not same]
    if others:
        refuse(
            f"ranks that train on the same rows have read others: {', '.join(others)} of their "
            "first batch differ",
            fix="let the dataset draw from torch's, Python's or numpy's own generator, which are "
            "seeded for every row, or from one that it seeds by the number of the row",
        )


def _digest(value: Tensor) -> int:
    """Return a number that tells rows, and their order, apart."""
    plain = torch.view_as_real(value) if value.is_complex() else value
    return mixed_seed(*torch.hash_tensor(plain.reshape(len(plain), -1), dim=1).tolist())
