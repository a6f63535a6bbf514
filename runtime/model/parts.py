"""Turns a model on the meta device into the part of it that this process runs, names unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from autopar.runtime.model.layer_names import named
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.lengths import begin_anew, begins_anew
from autopar.runtime.tensor.shards import Split, local_size, note_ties, places


@dataclass(frozen=True, slots=True)
class Rows:
    """A size in the shape of a crossing: so many times the rows of the microbatch that crosses."""

    times: int = 1

    def __mul__(self, times: int) -> Rows:
        return Rows(self.times * times)


ROWS = Rows()


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that one pipeline stage gives to the next: the whole one, and how it is split."""

    shape: tuple[int | Rows, ...]
    split: Split | None = None
    dtype: torch.dtype | None = None  # None: that of the training
    has_gradient: bool = True

    def described(self, tensor: Axis, dtype: torch.dtype, *, rows: int = 1) -> Tensor:
        """Return the tensor that this rank sends or receives; it has no memory."""
        sizes = (one.times * rows if isinstance(one, Rows) else one for one in self.shape)
        shape = [max(size, 0) for size in sizes]  # `h - 4` before h is known
        if self.split is not None:
            shape[self.split.dim] = local_size(self.split.parts, tensor)
        dtype = self.dtype or dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=self.has_gradient)

    @property
    def length(self) -> int | None:
        """How long the dim is that is split, where that may vary: one of single elements."""
        parts = self.split.parts if self.split is not None else ()
        return parts[0][0] if len(parts) == 1 and parts[0][1] == 1 else None


Gives: TypeAlias = tuple[Crossing, ...] | Callable[[Mapping[str, Tensor]], tuple[Crossing, ...]]


@dataclass(frozen=True, slots=True)
class StagePart:
    """A pipeline stage: the model's class there, what it holds, what it gives to the next.

    What it gives is a function of the batch where its lengths vary from one to another.
    `bounds` are the numbers in which stages of one class differ: their first layer, and its end.
    """

    kind: type[nn.Module]
    holds: tuple[str, ...]
    gives: Gives = ()
    bounds: Mapping[str, int] = field(default_factory=dict)

    def taken_from(self, model: nn.Module, tensor: Axis) -> nn.Module:
        """Turn a model on the meta device into this stage of it; every name stays as it is."""
        take_class(model, self.kind, tensor)
        model.__dict__.update(self.bounds)
        keep_only(model, self.holds)
        return model


def names_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all parameters and buffers, every alias of a tied one."""
    return tuple(place.name for place in places(model))


def take_classes(model: nn.Module, classes: Mapping[str, type[nn.Module]], tensor: Axis) -> None:
    """Let modules take subclasses of their classes, and tell them of the tensor axis.

    In the modules' names * stands for the number of a layer.
    """
    begin_anew(model)
    modules = dict(model.named_modules())
    for name, kind in named(classes, modules).items():
        take_class(modules[name], kind, tensor)


def take_class(module: nn.Module, kind: type[nn.Module], tensor: Axis) -> None:
    """Let a module take a subclass of its class, and tell it of the tensor axis.

    The forward of the subclass computes what the module's own hooks compute: they are dropped.
    """
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no kind of {type(module).__name__}")
    module.__class__ = kind
    module.__dict__.pop("forward", None)  # one of its own, in whose place that of the class comes
    begins = begins_anew(module)
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()
    if begins:
        begin_anew(module)
    module.__dict__["tensor"] = tensor


def keep_only(model: nn.Module, held: Collection[str]) -> None:
    """Let go of all parameters and buffers but those that are held, or lie in what is held.

    Modules stay, so that names and positions in lists are those of the whole model. A module that
    stands in several places is held where one of them is.
    """
    found = list(places(model))
    note_ties(model, found)
    kept = {(place.module, place.attribute) for place in found if is_held(place.name, held)}
    for place in found:
        if (place.module, place.attribute) not in kept:
            registry = place.module._parameters
            own = registry if place.attribute in registry else place.module._buffers
            own[place.attribute] = None


def is_held(name: str, held: Collection[str]) -> bool:
    """Whether a name, or a module that it is in, is among some."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in held for length in range(1, len(parts) + 1))


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Have parameters of these names, or in modules of these names, learn nothing."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_held(name, names):
            parameter.requires_grad_(False)


def submodules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of these names that hold something."""
    modules = [model.get_submodule(name) for name in names]
    return [module for module in modules if any(True for _ in places(module))]
