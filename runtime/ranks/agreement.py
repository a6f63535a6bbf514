"""Makes sure that ranks which train on the same rows have read the same."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis
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
