"""Records which ops of a training step draw random numbers, and from which state of a generator.

Ranks that draw from the same state draw the same numbers. So no mask is read: the states tell which
ranks share one, and how many numbers are independent.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.ranks import randomness

_OUR_FILES = str(Path(__file__).parent)
_PASSED = (str(Path(torch.__file__).parent), _OUR_FILES, "<")  # frames that are no place in a model
_SEEDING = "seeding"


@dataclass(frozen=True, slots=True)
class Draw:
    """One op that drew numbers: where, what, how many, from which state, in which pass."""

    module: str  # the path of the module whose code draws
    place: str  # the line of the script or the model, "train.py:121"
    op: str
    settings: tuple[float, ...]  # the op's own numbers: a probability, a mean, a deviation
    numbers: int
    state: str
    is_again: bool  # in a backward, where a layer runs again
    is_seeded: bool

    @property
    def seeds_a_split(self) -> bool:
        """Whether `split_randomness` drew the seed of what is drawn inside it."""
        return self.op == _SEEDING


@dataclass(frozen=True, slots=True)
class _Seen:
    """A draw whose module has no name yet."""

    module: nn.Module | None
    draw: Draw


class Drawing(TorchDispatchMode):
    """Records every op that moves a generator, in its forward and where a layer runs again.

    `unseeded` is the seed that the process had before it seeded itself.
    """

    def __init__(self, unseeded: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unseeded = unseeded
        self.seen: list[_Seen] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an op, unseen by modes that change calls of Python, and note what it drew."""
        del types
        with torch._C.DisableTorchFunction():
            return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or _generator_of(args, kwargs)
        seed, before = generator.initial_seed(), _state_of(generator)
        made = func(*args, **kwargs)
        if _state_of(generator) != before:
            is_seeded = seed != self.unseeded
            self._note(func, settings_of(func, args, kwargs), made, before, is_seeded=is_seeded)
        return made

    def _note(
        self, func: Any, settings: tuple[float, ...], made: Any, state: str, *, is_seeded: bool
    ) -> None:
        module, place = _origin()
        draw = Draw(
            module="",
            place=place,
            op=_SEEDING if place.startswith(_SEEDING) else func.name().split("::")[1].split(".")[0],
            settings=settings,
            numbers=max(one.numel() for one in _tensors(made)),
            state=state,
            is_again=torch._C._current_graph_task_id() != -1,
            is_seeded=is_seeded,
        )
        self.seen.append(_Seen(module, draw))

    def draws(self, parts: Iterable[nn.Module]) -> tuple[Draw, ...]:
        """Return what was drawn, each by the name of its module in parts of a model."""
        names: dict[int, str] = {}
        for part in parts:
            for name, module in part.named_modules():
                names.setdefault(id(module), name)
        return tuple(_named(one, names) for one in self.seen)


def _named(seen: _Seen, names: Mapping[int, str]) -> Draw:
    one, module = seen.draw, seen.module
    name = "" if module is None else names.get(id(module), type(module).__name__)
    return Draw(
        name, one.place, one.op, one.settings, one.numbers, one.state, one.is_again, one.is_seeded
    )


def settings_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the numbers that an op is called with, those that it has by default included."""
    rest = func._schema.arguments[len(args) :]
    given = (*args, *(kwargs.get(one.name, one.default_value) for one in rest))
    return tuple(one for one in given if isinstance(one, float))


def _generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return the generator of the device that an op works on: of its tensors, or as it is told."""
    tensors = [one.device for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    device = torch.device((*tensors, kwargs.get("device") or "cpu")[0])
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _state_of(generator: torch.Generator) -> str:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()


def _tensors(made: Any) -> Iterator[Tensor]:
    for one in made if isinstance(made, (tuple, list)) else (made,):
        if isinstance(one, Tensor):
            yield one


def _origin() -> tuple[nn.Module | None, str]:
    """Return the innermost module that runs, and the innermost line that is not torch's."""
    place, module = "", None
    for frame in _frames():
        file = frame.f_code.co_filename
        if not place and not file.startswith(_PASSED) and "contextlib" not in file:
            is_seeding = file == randomness.__file__
            place = _SEEDING if is_seeding else f"{Path(file).name}:{frame.f_lineno}"
        if module is None and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            module = first if isinstance(first, nn.Module) else None
        if place and module is not None:
            break
    return module, place


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
