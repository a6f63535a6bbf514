"""Refuses models that no script could train as they are built."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.planner.errors import InputError
from autopar.planner.model.functions import plain_function
from autopar.planner.model.hooks import global_hooks
from autopar.planner.trace.frames import defined_at

# What wraps a model or a part of one, by its class or a base of it: what that is, what is expected,
# what to do. By their names, for torch imports some when they are used.
_REFUSED = (
    (
        "SyncBatchNorm",
        "a SyncBatchNorm, which waits for all processes",
        "plain batch norms: scripts give them the statistics of all data ranks",
        "leave out convert_sync_batchnorm",
    ),
    (
        "DataParallel DistributedDataParallel FullyShardedDataParallel FSDPModule",
        "wrapped for data parallelism already",
        "a plain model: the plan decides how it is shared, and the script does it",
        "leave the wrapper out",
    ),
    (
        "ScriptModule",
        "compiled by torch.jit, which hides what it computes",
        "modules in Python",
        "leave out torch.jit.script and torch.jit.trace",
    ),
    (
        "OptimizedModule",
        "compiled by torch.compile, and traced by autopar instead",
        "modules as they are before",
        "leave out torch.compile in the model file",
    ),
)


def check_structure(model: nn.Module, where: str) -> None:
    """Raise an error where parts of a model cannot be found as torch finds them."""
    _check_nesting(model, "", (), where)
    _check_own_methods(model, where)


def check_model(model: nn.Module, where: str) -> None:
    """Raise an error for the first thing that stands in the way of training a model."""
    _check_parameters(model, where)
    _check_type(model, where)
    _refuse_wrapped(model, where)
    _refuse_global_hooks(where)


def _check_nesting(module: nn.Module, name: str, around: tuple[nn.Module, ...], where: str) -> None:
    """Refuse a module that is among its own parts: nothing could go through all of them."""
    if any(module is one for one in around):
        raise InputError(
            f"{name} is a module that contains itself",
            where=where,
            fix="keep a module that is not a part in a tuple: self.owner = (owner,)",
        )
    for own, part in module._modules.items():
        if part is not None:
            _check_nesting(part, f"{name}.{own}".lstrip("."), (*around, module), where)


# Methods by which torch, optimizers and scripts find what a model holds, as they call them.
_FINDING = {
    "named_modules": {"remove_duplicate": False},
    "modules": {},
    "named_children": {},
    "children": {},
    "named_parameters": {"remove_duplicate": False},
    "parameters": {"recurse": True},
    "named_buffers": {"remove_duplicate": False},
    "buffers": {"recurse": True},
}


def _check_own_methods(model: nn.Module, where: str) -> None:
    """Refuse a method of the model's own that finds something else than torch's does."""
    for module in _parts(model):
        for name, keywords in _FINDING.items():
            torchs = getattr(nn.Module, name)
            if getattr(type(module), name) is torchs:
                continue
            try:
                is_same = _found(getattr(module, name)(**keywords)) == _found(
                    torchs(module, **keywords)
                )
            except Exception:
                is_same = False
            if not is_same:
                raise InputError(
                    f"{type(module).__name__} has a method {name} that finds something else than "
                    f"torch.nn.Module.{name}",
                    where=where,
                    expected="torch's own: scripts find parameters, buffers and modules by it",
                    fix="leave it out; requires_grad_(False) on what shall not learn, or let "
                    "build_optimizer choose",
                )


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for part in module._modules.values():
        if part is not None:
            yield from _parts(part)


def _found(things: Iterable[Any]) -> list[object]:
    return [(one[0], id(one[1])) if isinstance(one, tuple) else id(one) for one in things]


def check_same_parameters(model: nn.Module, before: Collection[str], where: str) -> None:
    """Refuse a model whose forward makes or removes parameters; `before` are those it had."""
    after = dict(model.named_parameters())
    for name in sorted(after.keys() ^ set(before)):
        raise InputError(
            f"forward {'makes' if name in after else 'removes'} the parameter {name}",
            where=where,
            expected="the parameters that build_model returns: an optimizer holds these",
            fix="make them in __init__, and let them stay",
        )


def own_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating type that most of the parameters have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


def _refuse_wrapped(model: nn.Module, where: str) -> None:
    for name, module in model.named_modules():
        every = type(module).__mro__
        bases = {base.__name__ for base in every if base.__module__.startswith("torch.")}
        for kinds, is_what, expected, fix in _REFUSED:
            if not bases.isdisjoint(kinds.split()):
                found = f"{name or 'the model'} is {is_what}"
                raise InputError(found, where=where, expected=expected, fix=fix)


def _refuse_global_hooks(where: str) -> None:
    """Refuse hooks of torch that run in every module: none of these has them when it is printed."""
    for hook in global_hooks():
        raise InputError(
            "a hook is registered for all modules of the process",
            where=defined_at(plain_function(hook)) or where,
            expected="hooks of the model's own modules",
            fix="register it on the modules it is meant for: module.register_forward_hook(…)",
        )


def _check_type(model: nn.Module, where: str) -> None:
    """Refuse a model that scripts would train in 64 bits."""
    if own_dtype(model) is torch.float64:
        raise InputError(
            "the model is in float64",
            where=where,
            expected="float32, of which --precision makes what is trained in",
            fix="leave out .double() and torch.set_default_dtype",
        )


def _check_parameters(model: nn.Module, where: str) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise InputError("the model has no parameters", where=where, expected="something to train")
    lazy = [n for n, p in parameters.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        fix = "give the layer its sizes, or run one batch through it in build_model"
        raise InputError(f"parameter {lazy[0]} is lazy and has no shape yet", where=where, fix=fix)
    if not any(p.requires_grad for p in parameters.values()):
        fix = "leave requires_grad on for what should learn"
        raise InputError(f"all {len(parameters)} parameters are frozen", where=where, fix=fix)
    for name, parameter in parameters.items():
        _check_hooks(name, parameter, where)
        if parameter.layout != torch.strided:
            found = f"parameter {name} is sparse ({parameter.layout})"
            raise InputError(found, where=where, expected="dense parameters")
        if parameter.is_complex():
            fix = "hold its real and imaginary part as two parameters"
            found = f"parameter {name} is complex ({parameter.dtype})"
            raise InputError(found, where=where, expected="real parameters", fix=fix)


def _check_hooks(name: str, parameter: nn.Parameter, where: str) -> None:
    """Refuse what runs when a gradient is there: a rank has a part of it, of some rows."""
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        called = getattr(hook, "__qualname__", type(hook).__name__)
        raise InputError(
            f"the parameter {name} has a hook on its gradient ({called})",
            where=where,
            expected="parameters without hooks: a rank has a part of a gradient, or of its rows",
            fix="to freeze a part of it, compute with torch.where(learns, weight, "
            "weight.detach()) in the forward; what steps or clips belongs to build_optimizer",
        )
