"""Checks a model before it is traced, and finds the lines of its code that run.

Also finds which modules are in training and in evaluation mode. Scripts leave modes as the
constructor set them, like a plain loop that never calls `model.train()`.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from textwrap import dedent
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from autopar.planner.errors import InputError, SourceSpan
from autopar.planner.model.functions import global_hooks, plain_function

_OWN = f"{Path(__file__).resolve().parent.parent}{os.sep}"
TORCH = f"{Path(torch.__file__).parent}{os.sep}"  # not torchvision, which lies beside it
_LIBRARIES = (
    TORCH,
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    "<",  # generated code
)


@cache
def is_library_file(filename: str) -> bool:
    """Whether a file belongs to torch, Python or autopar, and not to the model."""
    in_packages = "site-packages" in filename or "dist-packages" in filename
    if filename.startswith(_LIBRARIES):
        return not in_packages or filename.startswith(TORCH)
    return str(Path(filename).resolve()).startswith(_OWN)


def failing_place(error: BaseException, model: nn.Module) -> str:
    """Return `file:line, in module path` of the innermost frame in the model's code."""
    paths = {id(module): path for path, module in model.named_modules()}
    place, module_path = "", ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            module_path = f"{paths[id(owner)]} ({type(owner).__name__})"
        if not is_library_file(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return ", in module ".join(part for part in (place, module_path) if part)


def calling_place() -> str:
    """Return `file:line` of the innermost frame in the model's code, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def calling_spans(step: CodeType) -> tuple[SourceSpan, ...]:
    """Return the expressions of the model that are being evaluated, the innermost one first.

    The last one is in the innermost forward, or in the loss function. The result is () if the step
    is not running: the exporter also makes nodes afterwards, when it copies the graph.
    """
    found: list[SourceSpan] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not step:
        code = frame.f_code
        if not is_library_file(code.co_filename):
            found.append(_span(code, frame.f_lasti))
            if code.co_name == "forward":
                break
        frame = frame.f_back
    return tuple(found) if frame is not None else ()


@cache
def _span(code: CodeType, instruction: int) -> SourceSpan:
    positions = islice(code.co_positions(), instruction // 2, None)
    line, end_line, column, end_column = (one or 0 for one in next(positions))
    return SourceSpan(code.co_filename, line, column, end_line, end_column)


def defined_at(function: Callable[..., Any] | None) -> tuple[SourceSpan, ...]:
    """Return the line of a function's definition, or ()."""
    function = function and inspect.unwrap(function)
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    line = code.co_firstlineno
    return (SourceSpan(code.co_filename, line, 0, line, 0),)


# Classes, or base classes, of modules that are refused: what the module is, what is expected, and
# what to do. They are given by name, because torch imports some lazily.
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
        "compiled by torch.compile, and autopar has to trace it uncompiled",
        "the modules themselves",
        "leave out torch.compile in the model file",
    ),
)


def check_structure(model: nn.Module, where: str) -> None:
    """Raise if a module contains itself, or if its methods find other parts than torch's would."""
    _check_nesting(model, "", (), where)
    _check_own_methods(model, where)


def check_model(model: nn.Module, where: str) -> None:
    """Raise for the first obstacle to training a model."""
    _check_parameters(model, where)
    _check_type(model, where)
    _refuse_wrapped(model, where)
    _refuse_global_hooks(where)


def _check_nesting(module: nn.Module, name: str, around: tuple[nn.Module, ...], where: str) -> None:
    """Raise for a module that contains itself."""
    if any(module is one for one in around):
        raise InputError(
            f"{name} is a module that contains itself",
            where=where,
            fix="put a module that is only referred to into a tuple: self.owner = (owner,)",
        )
    for own, part in module._modules.items():
        if part is not None:
            _check_nesting(part, f"{name}.{own}".lstrip("."), (*around, module), where)


# Methods by which torch, optimizers and scripts find a model's parts.
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
    """Raise for a model's own method that finds other parts than torch's does."""
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
                    fix="leave the method out; to freeze parameters: requires_grad_(False), or "
                    "leave them out in build_optimizer",
                )


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for part in module._modules.values():
        if part is not None:
            yield from _parts(part)


def _found(things: Iterable[Any]) -> list[object]:
    return [(one[0], id(one[1])) if isinstance(one, tuple) else id(one) for one in things]


def check_same_parameters(model: nn.Module, before: Collection[str], where: str) -> None:
    """Raise if the forward adds or removes parameters; `before` are the original ones."""
    after = dict(model.named_parameters())
    for name in sorted(after.keys() ^ set(before)):
        raise InputError(
            f"forward {'makes' if name in after else 'removes'} the parameter {name}",
            where=where,
            expected="the parameters that build_model returns: an optimizer holds these",
            fix="make them in __init__, and let them stay",
        )


def own_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating dtype that most elements of parameters have."""
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
    """Raise for torch's global hooks, which printed modules would not have."""
    for hook in global_hooks():
        raise InputError(
            "a hook is registered for all modules of the process",
            where=next(map(str, defined_at(plain_function(hook))), where),
            expected="hooks of the model's own modules",
            fix="register it on the modules it is meant for: module.register_forward_hook(…)",
        )


def _check_type(model: nn.Module, where: str) -> None:
    """Raise for a model that would be trained in float64."""
    if own_dtype(model) is torch.float64:
        raise InputError(
            "the model is in float64",
            where=where,
            expected="float32; --precision sets the dtype of the training",
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
    """Raise for gradient hooks: a rank has a shard of a gradient, or that of its own rows."""
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        called = getattr(hook, "__qualname__", type(hook).__name__)
        raise InputError(
            f"the parameter {name} has a hook on its gradient ({called})",
            where=where,
            expected="parameters without hooks: a rank has a shard of it, or that of its own rows",
            fix="to freeze a part of it, compute with torch.where(learns, weight, "
            "weight.detach()) in the forward; to step or clip, write it into build_optimizer",
        )


_LONGEST = 60  # characters of code in an error message


def check_root_trains(
    model: nn.Module, build_model: Callable[..., Any], name: str, where: str
) -> None:
    """Raise if the whole model is in eval mode, as from_pretrained returns it.

    Its dropout would be off, and its batch norms would keep their statistics.
    """
    if model.training:
        return
    line, returned = _last_return(inspect.unwrap(build_model))
    raise InputError(
        "the model is in eval mode: it has no dropout, and its batch norms learn no statistics",
        where=f"{where}:{line}" if line else f"{name} of {where}",
        expected="a model to train; parts that stay frozen may be in eval mode",
        fix=f"return {returned.removesuffix('.eval()') or 'model'}.train()",
    )


def _last_return(function: Callable[..., Any]) -> tuple[int, str]:
    """Return the line of a function's last `return`, and its expression if that is short."""
    try:
        lines, first = inspect.getsourcelines(function)
        (tree,) = ast.parse(dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return 0, ""
    *_, last = (None, *_returns(tree))
    if last is None or last.value is None:
        return 0, ""
    text = ast.unparse(last.value)
    is_bound = isinstance(last.value, ast.Name | ast.Attribute | ast.Call)
    shown = text if is_bound else f"({text})"
    return first + last.lineno - 1, shown if len(shown) <= _LONGEST else ""


def _returns(tree: ast.AST) -> Iterator[ast.Return]:
    """Yield the returns of a function, without those of nested functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returns(node)


def parts_in_eval_mode(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the outermost trainable parts in eval mode.

    Single layers do not count: an author sets a batch norm to eval mode to keep its statistics.
    """
    return tuple(_evaluating(model, ""))


def _evaluating(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module.named_children():
        own = f"{path}.{name}".lstrip(".")
        if child.training:
            yield from _evaluating(child, own)
        elif any(child.children()) and any(p.requires_grad for p in child.parameters()):
            yield own
