"""Turns a model's constructor into initial weights that are the same under every plan.

The model is built on the meta device while the constructor's ops are recorded. Each rank then
runs only the ops of the tensors that it holds, one tensor at a time.
"""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

from autopar.runtime.model.plain_tensors import move_plain_tensors, replace_plain_tensors
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import ALONE, Axis
from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.tensor.shards import (
    Split,
    TensorPlace,
    check_names,
    group_aliases,
    has_plain_memory,
    made_like,
    places,
    put_everywhere,
    put_into,
    starts_on_host,
)
from autopar.runtime.weights.plain_model import plain_model
from autopar.runtime.weights.recording.constants import bytes_of
from autopar.runtime.weights.recording.pretended_cpu import recorded
from autopar.runtime.weights.recording.recorded_ops import (
    History,
    RecordedOp,
    UnrecordableError,
    Value,
)
from autopar.runtime.weights.recording.recording import META, ConstructorRecording
from autopar.runtime.weights.saved_form import SavedForm, saved_form, unseen
from autopar.runtime.weights.stored_tensors import TensorSource, fill, in_float64

__all__ = ["Recipe", "record"]  # for scripts


@contextmanager
def new_objects_apart() -> Iterator[None]:
    """Freeze existing objects inside, so that the garbage collector only visits new ones.

    A process has hundreds of thousands of old objects; visiting all of them takes half a second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_real(recording: ConstructorRecording, except_for: Collection[int]) -> None:
    """Give values to all recorded tensors, except those with these ids.

    The tensors may be plain attributes, or in lists, closures, caches or other objects. Each stays
    the same object, and shared memory stays shared.
    """
    gc.collect()  # unreachable tensors need no values
    found = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    held = {id(one): one for one in (*found, *recording.adopted)}
    left = [
        one for key, one in held.items() if key not in except_for and recording.is_recorded(one)
    ]
    values = [recording.value(one) for one in left]
    with torch.no_grad():
        for one, made in zip(left, recording.history.replay(values), strict=True):
            put_into(one, made)


def recorded_model(
    factory: Callable[[], nn.Module], seed: int
) -> tuple[nn.Module, ConstructorRecording]:
    """Build a model whose recorded tensors have no memory; tensors from elsewhere keep theirs."""
    recording = ConstructorRecording(seed)
    with seeded(seed), recorded(recording):
        model = factory()
    if recording.failure is not None:  # the constructor caught the error and took another path
        raise recording.failure
    return model, recording


def move_to_meta(found: Collection[TensorPlace], on_meta: Callable[[Tensor], Tensor]) -> None:
    """Replace real tensors by meta tensors."""
    for group in group_aliases(found):
        if group[0].tensor.device != META:
            put_everywhere(group, on_meta(group[0].tensor.detach()))


def meta_model(factory: Callable[[], nn.Module], check: Callable[[nn.Module], None]) -> nn.Module:
    """Build a model without memory that otherwise equals the model of plain PyTorch.

    The constructor finds the same files, values and devices. Tensors that it leaves elsewhere, as
    in caches, get values. `check` is called before the tensors are replaced by meta tensors.
    """
    with new_objects_apart():
        model, recording = recorded_model(factory, seed=0)
        if isinstance(model, nn.Module):
            check(model)
            strip(model)
        kept = {id(place.tensor) for place in places(model)} if isinstance(model, nn.Module) else ()
        make_real(recording, kept)
    return model


def strip(model: nn.Module) -> None:
    """Move all tensors of a model to the meta device, registered or not."""
    move_to_meta(list(places(model)), lambda tensor: torch.empty_like(tensor, device=META))
    replace_plain_tensors(model, _without_memory)


def _without_memory(_: str, tensor: Tensor) -> Tensor:
    fresh = torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)
    return made_like(fresh, tensor)


NEVER_FILLED = "allocates it (torch.empty) and never fills it"
ON_META = "leaves it on the meta device, where tensors have no numbers"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The initial values of every parameter and buffer of a model, computed on request."""

    shapes: Mapping[str, tuple[int, ...]]
    source: Callable[[str], TensorSource]
    dtypes: Mapping[str, torch.dtype]  # chosen by the constructor
    digest: Callable[[str], int]  # processes compare these to check that their weights agree
    bare: Mapping[str, str] = field(default_factory=dict)  # tensors without values, and why
    whole: Callable[[], nn.Module] | None = None  # builds the whole model again, on meta

    def saved_form(self) -> SavedForm | None:
        """Return the files that the model's `save_pretrained` would write, or None without one."""
        if self.whole is None:
            return None
        with unseen():
            return saved_form(self.whole())

    @torch.no_grad()
    def materialise(
        self,
        model: nn.Module,
        splits: Mapping[str, Split],
        axis: Axis,
        device: torch.device,
    ) -> None:
        """Give values to tensors on meta: this rank's part, one tensor at a time.

        The model may be a part of the recorded model, with the same names, and may have been cut on
        meta by shard_parameters and fully_shard.
        """
        # checked against the whole model, of which this may be a stage
        check_names(splits, self.shapes)
        for group in group_aliases(places(model)):
            if group[0].tensor.device == META:
                shape, source = self.whole_tensor(group[0])
                fill(group, source, splits, axis, shape=shape, device=device)
            elif group[0].tensor.device.type != device.type and not starts_on_host(group[0].tensor):
                # sparse or quantised, so never cut
                put_everywhere(group, group[0].tensor.to(device))
        move_plain_tensors(model, device)

    def make(self, name: str) -> Tensor:
        """Return the initial values of a whole tensor."""
        made: Tensor = self.source(name)[...]
        return made

    def whole_tensor(self, place: TensorPlace) -> tuple[tuple[int, ...], TensorSource | None]:
        """Return the shape and the values of a whole tensor; no values in a dry run."""
        if place.name not in self.shapes:
            raise KeyError(f"the recorded model has no {place.name}: its names may not change")
        if detect_fake_mode() is not None:  # a dry run needs shapes only
            return self.shapes[place.name], None
        if place.name in self.bare:
            kind = "parameter" if isinstance(place.tensor, nn.Parameter) else "buffer"
            refuse(
                f"the {kind} {place.name} has no initial weights: the model's constructor "
                f"{self.bare[place.name]}, so each rank would start from other numbers",
                fix="fill it in build_model, say by nn.init.normal_(parameter, std=0.02), or start "
                "from trained --weights",
            )
        return self.shapes[place.name], self.source(place.name)


def record(
    factory: Callable[[], nn.Module], *, seed: int, dtype: torch.dtype | None = None
) -> tuple[nn.Module, Recipe]:
    """Return a model on the meta device, and the recipe of its weights.

    With dtype float64 the model has that dtype, so that plans can be compared to the last digits.
    """
    with unset_fake_temporarily():  # in a dry run: the constructor may read values
        model, recipe = _record(factory, seed)
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False  # ranks sum dense gradients

    def whole() -> nn.Module:
        return record(factory, seed=seed, dtype=dtype)[0]

    model = in_float64(model) if dtype is torch.float64 else model
    return model, replace(recipe, whole=whole)


def _record(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recipe]:
    try:
        with new_objects_apart():
            model, recording = recorded_model(factory, seed)
            recipe = _recipe(recording, model, factory, seed)
            make_real(recording, {id(place.tensor) for place in places(model)})
    except Exception as error:  # a constructor on meta may raise anything
        return _built_for_real(factory, seed, error)
    return model, recipe


def _recipe(
    recording: ConstructorRecording, model: nn.Module, factory: Callable[[], nn.Module], seed: int
) -> Recipe:
    history = recording.history
    found = _cut(model)
    for place in found:
        if recording.is_bare(place.tensor):
            raise UnrecordableError(f"{place.name} stays on the meta device")
    values = {place.name: recording.value(place.tensor) for place in found}
    move_to_meta(found, recording.on_meta)

    @cache
    def in_full() -> Mapping[str, Tensor]:
        return dict(_tensors(plain_model(factory, seed=seed)))

    def source(name: str) -> TensorSource:
        value = values[name]
        try:
            return history.copied(value) or history.replay([value])[0]
        except UnrecordableError as error:  # an op's real result differs from that on meta
            _note_in_full(error)
            return in_full()[name]

    bare = history.bare()
    never_filled = {
        place.name: NEVER_FILLED
        for place in found
        if isinstance(place.tensor, nn.Parameter)
        and values[place.name].storage in bare
        and place.tensor.numel()
    }
    return Recipe(
        {place.name: tuple(place.tensor.shape) for place in found},
        source=source,
        dtypes={place.name: place.tensor.dtype for place in found},
        bare=never_filled,
        digest=lambda name: digest_of_value(history, values[name]),
    )


_SEEN = 1024  # elements of a large tensor that are hashed
_SEEN_IN_FILE = 8  # fewer for a tensor in a file, which is slow to read


def digest_of(tensor: Tensor, *, seen_numbers: int = _SEEN) -> int:
    """Return a digest of all elements, or of a sample if the tensor is large and contiguous."""
    seen = tensor.detach()
    if seen.numel() > 2 * seen_numbers and seen.is_contiguous():
        seen = seen.view(-1)[:: seen.numel() // seen_numbers]
    return _number(bytes_of(seen).numpy().tobytes(), tuple(tensor.shape), tensor.dtype)


def digest_of_value(history: History, value: Value) -> int:
    """Return a digest of how a tensor is computed: ops, draws and constants."""
    numbers = _Numbers()
    made = [_in_digest(history, op, numbers) for op in history.ops_for([value])]
    used = sorted(numbers.items(), key=lambda item: item[1])
    constants = [_of_constant(history, one) for one, _ in used if one in history.constants]
    return _number(made, constants, numbers.named(value))


def _of_constant(history: History, storage: int) -> int:
    in_file = history.constants.is_in_file(storage)
    seen = _SEEN_IN_FILE if in_file else _SEEN
    return digest_of(history.constants[storage], seen_numbers=seen)


class _Numbers(dict[int, int]):
    """Numbers storages by first occurrence, so that unrelated ops do not change a digest."""

    def named(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        place = self.setdefault(leaf.storage, len(self))
        return place, leaf.dtype, leaf.size, leaf.stride, leaf.offset


def _in_digest(history: History, op: RecordedOp, numbers: _Numbers) -> tuple[Any, ...]:
    """Return the facts of an op that go into a digest."""
    given = tree_map(numbers.named, (op.arguments, sorted(op.keywords.items())))
    if op.draw is None:
        return op.name, given
    origin, steps = history.origin(op.draw)
    state = None if origin.state is None else digest_of(origin.state)
    return op.name, given, origin.seed, state, steps


def _number(*parts: Any) -> int:
    data = b"/".join(one if isinstance(one, bytes) else repr(one).encode() for one in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 1


def build(factory: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Build a whole model on the CPU, with the same initial weights as under any plan."""
    model, recipe = record(factory, seed=seed)
    recipe.materialise(model, {}, ALONE, torch.device("cpu"))
    return model


def _built_for_real(
    factory: Callable[[], nn.Module], seed: int, error: Exception
) -> tuple[nn.Module, Recipe]:
    """Build the whole model in memory, because its constructor cannot be recorded."""
    model = plain_model(factory, seed=seed)
    found = _cut(model)
    tensors = dict(_tensors(model))
    on_meta = {place.name: ON_META for place in found if place.tensor.is_meta}
    if not on_meta:  # otherwise a rank refuses the tensors on meta, or fills them from files
        _note_in_full(error)
    move_to_meta(found, lambda tensor: torch.empty_like(tensor, device=META))
    return model, Recipe(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        source=tensors.__getitem__,
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        bare=on_meta,
        digest=lambda name: digest_of(tensors[name]),
    )


def _cut(model: nn.Module) -> list[TensorPlace]:
    """Return the places of tensors that may be cut; sparse and quantised tensors stay whole."""
    return [place for place in places(model) if has_plain_memory(place.tensor)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((place.name, place.tensor.detach()) for place in _cut(model))


def _note_in_full(error: Exception) -> None:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    warnings.warn(
        f"the model is built in full on every process, because its constructor cannot be "
        f"recorded: {reason}",
        stacklevel=4,
    )
