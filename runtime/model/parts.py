"""Prepares a rank's modules: looks up names, replaces classes, shards parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import DRY_RUN, Axis
from autopar.runtime.tensor.collectives import fuse_with_products
from autopar.runtime.tensor.shards import (
    Split,
    check_names,
    group_aliases,
    local_chunks,
    local_part,
    named,
    note_ties,
    places,
    put,
    split_of,
    starred,
)
from autopar.runtime.tensor.slices import begin_anew, begins_anew

__all__ = [
    "ROWS",
    "Crossing",
    "StagePart",
    "compile_layers",
    "freeze",
    "keep_apart",
    "shard_parameters",
    "submodules",
    "use_classes",
    "use_float8",
]

OUTERMOST = "_autopar_recomputes"  # marks modules whose own forward wraps the class's


def class_with_forward(module: nn.Module) -> type[nn.Module]:
    """Return a class whose forward is the module's, even if it was assigned to the instance.

    `self.forward = self.forward_train` in an __init__ would hide the forward of any subclass that
    the module is given. So this function becomes the forward of a new class, whose subclasses can
    override it. The forward of a recomputed module stays on the instance, because it calls the
    class's forward.
    """
    kind = type(module)
    if OUTERMOST in module.__dict__ or "forward" not in module.__dict__:
        return kind
    own = module.__dict__.pop("forward")

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def keep_apart(module: nn.Module) -> None:
    """Make a module (a layer) copy its input tensors, and return no views.

    A recomputed forward needs its inputs unchanged, and inputs from fully_shard must not be written
    to. Writing to a view of an output would drop the output's hooks. The module gets a subclass of
    its class: parameters, buffers and names stay as they are.
    """
    kind = class_with_forward(module)
    module.__class__ = type(f"Apart{kind.__name__}", (_CopyingModule, kind), {})


class _CopyingModule(nn.Module):
    """A module that does not write to its inputs, and whose outputs may be written to."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's class."""
        args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        results = super().forward(*args, **kwargs)
        return tree_map_only(Tensor, lambda one: one.clone() if one._is_view() else one, results)


@dataclass(frozen=True, slots=True)
class Rows:
    """A size that is a multiple of the microbatch's rows."""

    times: int = 1

    def __mul__(self, times: int) -> Rows:
        return Rows(self.times * times)


ROWS = Rows()


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that one pipeline stage sends to the next: its whole shape, and how it is split."""

    shape: tuple[int | Rows, ...]
    split: Split | None = None
    dtype: torch.dtype | None = None  # None: the training's dtype
    has_gradient: bool = True

    def described(self, tensor: Axis, dtype: torch.dtype, *, rows: int = 1) -> Tensor:
        """Return the tensor that this rank sends or receives, on the meta device."""
        sizes = (one.times * rows if isinstance(one, Rows) else one for one in self.shape)
        # for an unknown batch all lengths are 1, so a size such as `h - 4` may be negative
        shape = [max(size, 0) for size in sizes]
        if self.split is not None:
            shape[self.split.dim] = self.split.cut(shape, tensor).sizes[tensor.rank]
        dtype = self.dtype or dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=self.has_gradient)

    @property
    def length(self) -> int | None:
        """The whole length of the split dim, if it varies between batches; else None."""
        if self.split is None or self.split.parts is not None:
            return None
        size = self.shape[self.split.dim]
        return size if isinstance(size, int) else None


Gives: TypeAlias = tuple[Crossing, ...] | Callable[[Mapping[str, Tensor]], tuple[Crossing, ...]]


@dataclass(frozen=True, slots=True)
class StagePart:
    """A pipeline stage: the class for the model, the modules it holds, and the tensors it sends.

    If the lengths of sent tensors vary, `gives` is a function of the batch. `bounds` are attributes
    that differ between stages of one class: the first layer, and the end of the range of layers.
    """

    kind: type[nn.Module]
    holds: tuple[str, ...]
    gives: Gives = ()
    bounds: Mapping[str, int] = field(default_factory=dict)

    def taken_from(self, model: nn.Module, tensor: Axis) -> nn.Module:
        """Reduce a model on the meta device to this stage; names stay as they are."""
        take_class(model, self.kind, tensor)
        model.__dict__.update(self.bounds)
        keep_only(model, self.holds)
        return model


def names_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all parameters and buffers, including every alias of a tied one."""
    return tuple(place.name for place in places(model))


def shard_parameters(model: nn.Module, splits: Mapping[str, Split], axis: Axis) -> None:
    """Replace every listed parameter or buffer, under all its aliases, by this rank's part.

    In the names of `splits`, * stands for any number, such as that of a layer.
    """
    aliases = group_aliases(places(model))
    known = [place.name for group in aliases for place in group]
    check_names(splits, {one for name in known for one in (name, *starred(name))})
    own = named(splits, known)
    for group in aliases:
        split = split_of(group, own)
        if split is not None:
            first = group[0].tensor
            with torch.no_grad():
                part = local_part(first.detach(), split, axis)
            put(group, part, local_chunks(tuple(first.shape), split, axis))


def use_classes(model: nn.Module, classes: Mapping[str, type[nn.Module]], tensor: Axis) -> None:
    """Give modules subclasses of their classes, and the tensor axis as an attribute.

    In the names of `classes`, * stands for any number, such as that of a layer.
    """
    begin_anew(model)
    modules = dict(model.named_modules())
    for name, kind in named(classes, modules).items():
        take_class(modules[name], kind, tensor)


def take_class(module: nn.Module, kind: type[nn.Module], tensor: Axis) -> None:
    """Give a module a subclass of its class, and the tensor axis as an attribute.

    The subclass's forward includes what the module's own hooks compute, so the hooks are removed.
    """
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no kind of {type(module).__name__}")
    module.__class__ = kind
    module.__dict__.pop("forward", None)  # an instance's own forward would hide the class's
    begins = begins_anew(module)
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()
    if begins:
        begin_anew(module)
    module.__dict__["tensor"] = tensor


def keep_only(model: nn.Module, names: Collection[str]) -> None:
    """Remove all parameters and buffers that are not `is_inside` these names.

    The modules stay, so that names and positions in lists are those of the whole model. A module
    with several names is kept if one of them is.
    """
    found = list(places(model))
    note_ties(model, found)
    kept = {(place.module, place.attribute) for place in found if is_inside(place.name, names)}
    for place in found:
        if (place.module, place.attribute) not in kept:
            registry = place.module._parameters
            own = registry if place.attribute in registry else place.module._buffers
            own[place.attribute] = None


def is_inside(name: str, names: Collection[str]) -> bool:
    """Whether `names` has this name, or that of a module that contains it."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Stop gradients for parameters with these names, or in modules with these names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_inside(name, names):
            parameter.requires_grad_(False)


def submodules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules with these names that have parameters or buffers."""
    modules = [model.get_submodule(name) for name in names]
    return [module for module in modules if any(True for _ in places(module))]


_IN_FLOAT8 = "_autopar_in_float8"  # marks modules that multiply in float8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A scaling of float8 products: what its kernels need, and how modules are converted to it."""

    multiple: int  # the kernels need both sizes of a weight to be multiples of this
    has_units: Callable[[], bool]  # whether the GPU has units for it
    gathers: bool  # zero 3 gathers the weights in float8
    converted: Callable[[nn.Module, str], nn.Module]  # takes a module and the scaling's name


def _has_float8() -> bool:
    """Whether the GPU has units for float8: Ada and Hopper were the first of NVIDIA's."""
    return bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 9)


def _by_recipe(module: nn.Module, recipe: str) -> nn.Module:
    """Return a module that multiplies by a recipe of torchao; CPUs emulate the products.

    Scales are rounded to powers of two: a tensor and its parts on several ranks are then rounded
    alike, although their scales differ.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # the product for a weight's gradient needs a multiple of 16 rows, so a microbatch's rows are
    # padded; nothing is copied if their number is such a multiple
    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=not torch.cuda.is_available(),
        pad_inner_dim=True,
        round_scales_to_power_of_2=True,
    )
    made: nn.Module = convert_to_float8_training(module, config=config)
    return made


def _has_mxfp8() -> bool:
    """Whether torchao has kernels for the GPU: B200, B300, GB200 and GB300."""
    return not torch.version.hip and torch.cuda.get_device_capability()[0] == 10


def _in_blocks(module: nn.Module, _: str) -> nn.Module:
    """Return a module whose products have a scale for each 32 elements along the dim they sum over.

    Parts of a tensor on several ranks have the same blocks as the whole, and so the same scales.
    """
    made = copy(module)
    made.__class__ = _block_scaled()
    return made


@cache
def _block_scaled() -> type[nn.Linear]:
    """Return the class of linear layers with block-scaled products; torchao must be installed."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    class MXFP8Linear(nn.Linear):
        """A linear layer whose three products multiply blocks of 32 elements in float8."""

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            """Multiply; kernels take bf16, and CPUs and other dtypes emulate them."""
            rows = input.reshape(-1, input.shape[-1]).contiguous()
            count, kernels = rows.shape[0], KernelPreference.EMULATED
            if rows.is_cuda and rows.dtype is torch.bfloat16:
                kernels = KernelPreference.AUTO
            if missing := -count % 32:  # blocks of a weight's gradient are 32 rows
                rows = functional.pad(rows, (0, 0, 0, missing))
            rceil = ScaleCalculationMode.RCEIL
            result: Tensor = _to_mxfp8_then_scaled_mm(rows, self.weight, kernels, rceil)
            result = result[:count].reshape(*input.shape[:-1], -1)
            return result if self.bias is None else result + self.bias

    return MXFP8Linear


SCALINGS: Mapping[str, Scaling] = {
    "tensorwise": Scaling(multiple=16, has_units=_has_float8, gathers=True, converted=_by_recipe),
    "rowwise": Scaling(multiple=16, has_units=_has_float8, gathers=False, converted=_by_recipe),
    "mxfp8": Scaling(multiple=32, has_units=_has_mxfp8, gathers=False, converted=_in_blocks),
}


def use_float8(
    model: nn.Module, names: Sequence[str], scaling: str, *, excluding: Collection[str] = ()
) -> None:
    """Let the nn.Linear modules in the named modules multiply in float8, by torchao.

    Modules in `excluding`, frozen weights and sizes that do not suit the kernels stay as they are.
    In float64 and in a dry run nothing changes. Call this before `compile_layers`.
    """
    if os.environ.get(DRY_RUN, "").count("/") == 1:
        return  # emulated products would take memory that kernels do not
    own = SCALINGS[scaling]
    if torch.cuda.is_available() and not own.has_units():
        refuse(
            f"the plan multiplies in float8 ({scaling}), and {torch.cuda.get_device_name()} has no "
            "such units",
            fix="plan for this device, without --float8",
        )
    for path, module in model.named_modules():
        if is_inside(path, names) and not is_inside(path, excluding) and _suits(module, own):
            try:
                made = own.converted(module, scaling)
            except ImportError as error:
                refuse(
                    f"the plan multiplies in float8, and torchao is not installed, or not as it "
                    f"should be: {error}",
                    fix="pip install 'torchao>=0.18', or plan without --float8",
                )
            module.__class__ = type(made)
            module.__dict__.update(made.__dict__ | module.__dict__ | {_IN_FLOAT8: scaling})


def in_float8(parts: Iterable[nn.Module]) -> dict[Any, Scaling]:
    """Return the modules that multiply in float8, each with its scaling."""
    every = (module for part in parts for module in part.modules())
    return {one: SCALINGS[one.__dict__[_IN_FLOAT8]] for one in every if _IN_FLOAT8 in one.__dict__}


def _suits(module: nn.Module, scaling: Scaling) -> bool:
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    is_trained = weight.requires_grad and weight.dtype is not torch.float64
    return is_trained and all(size % scaling.multiple == 0 for size in weight.shape)


def compile_layers(
    model: nn.Module,
    names: Sequence[str],
    *,
    lengths_vary: bool = False,
    fusing: Axis | None = None,
) -> None:
    """Compile the named layers, each separately; layers with equal code share the compiled code.

    Call this before `recompute` and `wrap`, so that the code that they add to a layer is not
    compiled. A line that torch cannot compile runs as it is, between two compiled parts. Dropout
    draws the same numbers as without compiling. Each shape of the arguments is compiled by itself.
    But with `lengths_vary`, the code compiled for the second length serves all later ones, too.
    Messages of the axis `fusing` are fused with the products beside them.
    """
    if fusing is not None:
        fuse_with_products(fusing)
    layers = submodules(model, names)
    torch._inductor.config.fallback_random = True
    config = torch._dynamo.config
    # layers may differ in shapes, or in numbers that they read
    config.recompile_limit = max(config.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.__class__ = class_with_forward(layer)
        forward = MethodType(type(layer).forward, layer)
        layer.forward = torch.compile(forward, dynamic=None if lengths_vary else False)
