"""The outputs passed to metrics(), and the means of its results."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from autopar.runtime.data.batches import Batch
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import every_rank, summed
from autopar.runtime.ranks.user_code import exit_on_error

__all__ = ["Absent", "Outputs", "named_outputs"]  # for scripts


def once(found: Tensor, times: int) -> Tensor:
    """Count repeated rows once: return their sums divided by `times`; 0 if `times` is 0."""
    return found / times if times else torch.zeros_like(found)


def over_ranks(own: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over data ranks of a tensor that is equal along the other axes."""
    return summed(own, mesh.world) / (mesh.tensor.size * mesh.pipeline.size)


class Outputs(dict[str, Any]):
    """The outputs of a model that returns a dataclass or a library's output class.

    Entries are found by name, by attribute, and by index among those that are not None.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the outputs have no {name}, but {', '.join(self)}")

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return [value for value in self.values() if value is not None][key]


def named_outputs(**values: Any) -> Any:
    """Return a namedtuple with the field names of the model's output."""
    return namedtuple("NamedOutputs", values)(**values)


class Absent:
    """A placeholder for an output that a script does not compute.

    The loss does not depend on such an output, or it is an object that a trace does not see into.
    If metrics() uses a placeholder, the script exits with a message.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def _leave(self, *_: Any, **__: Any) -> NoReturn:
        refuse(
            f"metrics() of the model file uses {self._place}, which this script does not compute: "
            "it computes only what the loss depends on",
            fix="compute it in metrics() from the other outputs, or plan without tensor and "
            "pipeline ranks (--pin tp=1 --pin pp=1)",
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._leave(name)

    @classmethod
    def __torch_function__(cls, *given: Any, **_: Any) -> NoReturn:
        """Exit if a torch function gets the placeholder."""
        next(one for one in tree_iter(given) if isinstance(one, cls))._leave()


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "neg", "abs",
    "getitem", "iter", "len", "bool", "float", "int", "call",
):  # fmt: skip
    setattr(Absent, f"__{_name}__", Absent._leave)


ATTRIBUTE = "for_metrics"  # set on a model part whose forward returns only the loss
Measure: TypeAlias = Callable[[Any, Batch], Mapping[str, Tensor]]


class RowMetrics:
    """The metrics of one evaluation: for each, the mean over all elements of all rows.

    Without `measure` there are none. In a pipeline only the last stage measures.
    """

    def __init__(self, measure: Measure | None, mesh: Mesh) -> None:
        self._measure, self._mesh = measure, mesh
        self._outputs: list[Any] = []  # of the last microbatch, if this rank computes them
        self.sums: dict[str, Tensor] = {}  # per metric: sum of the elements, and their number

    @contextmanager
    def watching(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Capture the outputs that a forward returns, or stores if it returns only the loss."""

        def take(part: nn.Module, _: Any, returned: Any) -> None:
            found = [vars(part).pop(ATTRIBUTE)] if ATTRIBUTE in vars(part) else []
            self._outputs = found or ([returned] if self._mesh.pipeline.size == 1 else [])

        watched = parts if self._measure is not None else ()
        handles = [part.register_forward_hook(take) for part in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add(self, batch: Batch, times: int) -> None:
        """Add the microbatch that the model has just seen; its rows occur `times` times each."""
        if self._measure is None or not self._outputs:
            return
        with exit_on_error("metrics() of the model file", self._measure):
            outputs = tree_map_only(Tensor, Tensor.detach, self._outputs.pop())
            found = self._measure(outputs, batch)
        fault = fault_of_metrics(found, like=self.sums)
        if fault is not None:
            refuse(fault[0], fix=fault[1])
        for name, value in found.items():
            # metrics() may use numpy, and return tensors on the CPU; ranks add up on the device
            elements = value.to(self._mesh.device, torch.float64)
            own = torch.stack([elements.sum(), elements.new_full((), value.numel())])
            self.sums[name] = self.sums.get(name, 0) + once(own, times)

    def means(self) -> dict[str, float]:
        """Return the means over the rows of all data ranks."""
        names = self._names()
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        own = torch.stack([self.sums.get(name, nothing) for name in names], 1)
        sums, counts = over_ranks(own, self._mesh)
        return dict(zip(names, (sums / counts).tolist(), strict=True))

    def _names(self) -> Sequence[str]:
        """Return the names of the metrics; in a pipeline only the last stage knows them."""
        if self._measure is None or self._mesh.pipeline.size == 1:
            return [*self.sums]
        known = every_rank([*self.sums], self._mesh.pipeline)
        return next((names for names in known if names), [])


def fault_of_metrics(found: object, *, like: Iterable[str] = ()) -> tuple[str, str] | None:
    """Return why metrics have no mean over all rows and how to fix this, or None.

    `like` are the metrics' names in an earlier batch.
    """
    if not isinstance(found, Mapping) or not all(isinstance(one, Tensor) for one in found.values()):
        return (
            f"metrics() of the model file returns {_kinds(found)}",
            "let it return a dict of tensors, with a number for each row or each target",
        )
    for name, value in found.items():
        if not value.ndim:
            return (
                f"{name!r} of metrics() is a single number, so the mean over all rows cannot be "
                "computed from those of batches",
                "leave out .mean() or .sum(): let it have a number for each row or each target",
            )
    names = list(like)
    if names and names != list(found):
        return (
            f"metrics() returns {', '.join(found)} of one batch, and {', '.join(names)} of another",
            "let it return the same names for all batches, in one order",
        )
    return None


def _kinds(found: object) -> str:
    if not isinstance(found, Mapping):
        return f"a {type(found).__name__}"
    kinds = sorted({type(one).__name__ for one in found.values()})
    return f"a dict of {' and '.join(kinds)}"
