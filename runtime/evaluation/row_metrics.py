"""Turns what a model file's metrics() says of microbatches into means over all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.runtime.data.batches import Batch
from autopar.runtime.evaluation.sums import once, over_ranks
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.user_code import told

Measure: TypeAlias = Callable[[Any, Batch], Mapping[str, Tensor]]


class RowMetrics:
    """The metrics of one evaluation: of each, the mean of its elements, however many a row has.

    Without a `measure` there are none.
    """

    def __init__(self, measure: Measure | None) -> None:
        self._measure = measure
        self._outputs: Any = None  # of the last microbatch
        self._sums: dict[str, Tensor] = {}  # of the elements, and how many they are

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Take what a model returns."""

        def take(_: nn.Module, __: Any, outputs: Any) -> None:
            self._outputs = outputs

        handle = model.register_forward_hook(take)
        try:
            yield
        finally:
            handle.remove()

    def add(self, batch: Batch, times: int) -> None:
        """Add the microbatch that the model has just seen, whose rows are there so many times."""
        if self._measure is None:
            return
        with told("metrics() of the model file"):
            found = self._measure(self._outputs, batch)
        _check(found, like=self._sums)
        for name, value in found.items():
            elements = value.double()
            own = torch.stack([elements.sum(), elements.new_tensor(value.numel())])
            self._sums[name] = self._sums.get(name, 0) + once(own, times)

    def means(self, mesh: Mesh) -> dict[str, float]:
        """Return the means over the rows of all data ranks."""
        if not self._sums:
            return {}
        sums, counts = over_ranks(torch.stack(list(self._sums.values()), 1), mesh)
        return dict(zip(self._sums, (sums / counts).tolist(), strict=True))


def _check(found: object, *, like: Mapping[str, Tensor]) -> None:
    """Leave where metrics are not what a mean over all rows can be taken of."""
    if not isinstance(found, Mapping) or not all(isinstance(one, Tensor) for one in found.values()):
        refuse(
            f"metrics() of the model file returns {_kinds(found)}",
            fix="let it return a dict of tensors, with a number for each row or each target",
        )
    for name, value in found.items():
        if not value.ndim:
            refuse(
                f"{name!r} of metrics() is a single number, and no mean over all rows follows from "
                "those of batches",
                fix="leave out .mean() or .sum(): let it have a number for each row or each target",
            )
    if like and list(like) != list(found):
        refuse(
            f"metrics() returns {', '.join(found)} of one batch, and {', '.join(like)} of another",
            fix="let it return the same names for all batches, in one order",
        )


def _kinds(found: object) -> str:
    if not isinstance(found, Mapping):
        return f"a {type(found).__name__}"
    kinds = sorted({type(one).__name__ for one in found.values()})
    return f"a dict of {' and '.join(kinds)}"
