"""Lets tensors that are being recorded on meta look like tensors on the CPU to a constructor.

Many initialisers skip tensors that are on meta, and constructors read small tables of numbers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.runtime.weights.draws import rejecting_by
from autopar.runtime.weights.recorded_ops import CPU, Recording, is_recorded

ANSWERS = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: CPU,
}
READERS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
INDEXERS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class _PretendedCpu(TorchFunctionMode):
    """Answers questions about recorded tensors as real ones would."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        is_about_one = bool(args) and isinstance(args[0], Tensor) and is_recorded(args[0])
        if is_about_one and func in ANSWERS:
            return ANSWERS[func]
        if is_about_one and func in READERS:
            answer = func(*self._recording.real(args), **(kwargs or {}))
            if not isinstance(answer, list):
                answer.flags.writeable = False  # what is written there would be lost
            return answer
        if is_about_one and func in INDEXERS:
            args = (args[0], _as_tensors(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _as_tensors(index: Any) -> Any:
    """Return an index whose lists and arrays are tensors: torch would lay them on meta, unseen."""
    if isinstance(index, tuple):
        return tuple(map(_as_tensors, index))
    if hasattr(index, "__array__") and not isinstance(index, Tensor):
        return torch.as_tensor(index)
    if isinstance(index, list) and index and all(map(_is_plain, index)):
        return torch.tensor(index)
    return index


def _is_plain(item: Any) -> bool:
    """Whether something is a number, or a list of numbers."""
    return all(map(_is_plain, item)) if isinstance(item, list) else isinstance(item, (int, bool))


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Record what a constructor does in here."""

    def one_draw(original: Any, tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        if not is_recorded(tensor):
            filled: Tensor = original(tensor, *args, generator=generator)
            return filled
        recording.write_down_initialiser(original, tensor, *args, generator=generator)
        return tensor

    recording.draws.begin()
    with recording, _PretendedCpu(recording), rejecting_by(one_draw):
        yield
