"""Turns a model's constructor into initial weights that are the same under every plan.

The model is built on the meta device while each op of its constructor is recorded; a rank then
replays, one parameter at a time, only what it holds, each random op seeded by its own number.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from autopar.runtime.ranks.mesh import ALONE, Axis
from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.tensor.shards import (
    Place,
    Split,
    attributes,
    check_names,
    group_aliases,
    hang,
    places,
)
from autopar.runtime.weights.filling import fill
from autopar.runtime.weights.plain_model import plain_model
from autopar.runtime.weights.pretended_cpu import recorded
from autopar.runtime.weights.recorded_ops import META, Recording


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make every parameter, buffer and tensor attribute of a model, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[[str], Tensor]
    dtypes: Mapping[str, torch.dtype]  # as the constructor chose them
    bare: Collection[str] = frozenset()  # what the constructor made, and gave no numbers

    @torch.no_grad()
    def materialise(
        self,
        model: nn.Module,
        splits: Mapping[str, Split],
        axis: Axis,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Give real values to what is still on meta: this rank's part, one tensor at a time.

        The model may be any part of the recorded one as long as names are kept, and may have been
        cut on meta by shard_parameters and fully_shard. Floating-point parameters and buffers get
        the dtype, as module.to(dtype) would give it.
        """
        check_names(splits, self.shapes)  # of the whole model, of which this may be a stage
        for group in group_aliases(places(model)):
            if group[0].tensor.device == META:
                shape, source = self._source(group[0])
                fill(group, source, splits, axis, shape=shape, device=device, dtype=dtype)
        for place in attributes(model):
            if place.tensor.device == META:
                shape, source = self._source(place)
                real = torch.empty(shape, dtype=place.tensor.dtype, device=device)
                setattr(
                    place.module, place.attribute, real if source is None else real.copy_(source)
                )

    def _source(self, place: Place) -> tuple[tuple[int, ...], Tensor | None]:
        if place.name not in self.shapes:
            raise KeyError(f"the recorded model has no {place.name}: its names may not change")
        if detect_fake_mode() is not None:  # a dry run, which needs shapes only
            return self.shapes[place.name], None
        if place.name in self.bare and isinstance(place.tensor, nn.Parameter):
            refuse(
                f"the parameter {place.name} has no initial weights: the model's constructor "
                "takes memory for it (torch.empty) and never fills that, so each rank would start "
                "from other numbers",
                fix="fill it in build_model, say by nn.init.normal_(parameter, std=0.02), or start "
                "from trained --weights",
            )
        return self.shapes[place.name], self.make(place.name)


def record(
    factory: Callable[[], nn.Module], *, seed: int, dtype: torch.dtype | None = None
) -> tuple[nn.Module, Recipe]:
    """Build a model on the meta device, and the recipe of its weights.

    With float64 the model is in that: plans are compared to the last digits.
    """
    model, recipe = _record(factory, seed)
    return (model.to(dtype) if dtype is torch.float64 else model), recipe


def _record(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recipe]:
    recording = Recording(seed)
    try:
        with seeded(seed), recorded(recording):
            model = factory()
        if recording.failure is not None:  # a constructor that goes on has done something else
            raise recording.failure
    except Exception as error:  # whatever a constructor does that meta tensors cannot
        return _built_for_real(factory, seed, error)
    values = {place.name: recording.value(place.tensor) for place in _tensors(model)}
    _move_to_meta(model, recording.on_meta)
    shapes = {name: value.size for name, value in values.items()}
    bare = recording.bare()
    return model, Recipe(
        shapes,
        make=lambda name: recording.replay([values[name]])[0],
        dtypes={name: value.dtype for name, value in values.items()},
        bare={
            name for name, value in values.items() if value.storage in bare and 0 not in value.size
        },
    )


def build(factory: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Build a whole model on the CPU with the weights that every plan starts from."""
    model, recipe = record(factory, seed=seed)
    recipe.materialise(model, {}, ALONE, torch.device("cpu"))
    return model


def _built_for_real(
    factory: Callable[[], nn.Module], seed: int, error: Exception
) -> tuple[nn.Module, Recipe]:
    """Build the whole model in memory, where its constructor cannot be recorded."""
    model = plain_model(factory, seed=seed)
    warnings.warn(
        f"the model is built in full on every process, because its constructor cannot be "
        f"recorded: {error}",
        stacklevel=3,
    )
    tensors = {place.name: place.tensor.detach() for place in _tensors(model)}
    _move_to_meta(model, lambda tensor: torch.empty_like(tensor, device=META))
    return model, Recipe(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        make=tensors.__getitem__,
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
    )


def _tensors(model: nn.Module) -> Iterator[Place]:
    yield from places(model)
    yield from attributes(model)


def _move_to_meta(model: nn.Module, on_meta: Callable[[Tensor], Tensor]) -> None:
    """Let go of the numbers of real tensors."""
    for group in group_aliases(_tensors(model)):
        if group[0].tensor.device != META:
            hang(group, on_meta(group[0].tensor.detach()))
