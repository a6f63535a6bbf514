"""Puts printed classes onto real models, and compares what they compute with the originals."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.codegen.forward.opened import OpenedClass, OpenedSource
from autopar.codegen.forward.reading.modules import Modules, modules_of
from autopar.codegen.text.values import IN_FORWARDS
from autopar.planner.model.model_file import ModelFile
from autopar.planner.trace.build import checked_loss
from tests.planner.subjects import zoo_file


@cache
def zoo_modules(name: str, *arguments: str) -> Modules:
    """Return what emission knows of a zoo model's modules."""
    with torch.device("meta"):
        return modules_of(zoo_file(name, *arguments).build_model())


def namespace(opened: OpenedSource) -> dict[str, Any]:
    """Run the printed sources and return what they define."""
    found: dict[str, Any] = {}
    for line in IN_FORWARDS.values():
        exec(line, found)
    for one in opened.imported:
        found[one.name] = attrgetter(one.qualname)(_imported(one.module))
    for cls in (*opened.classes, *(stage.cls for stage in opened.stages)):
        exec(compile(cls.source, f"<{cls.name}>", "exec"), found)
    for source in (opened.loss, opened.valid_targets):
        if source is not None:
            exec(source, found)
    return found


def _imported(module: str) -> ModuleType:
    return sys.modules.get(module) or importlib.import_module(module)


def use_classes(
    model: nn.Module, classes: Sequence[OpenedClass], found: Mapping[str, Any], axis: Any = None
) -> None:
    """Have the instances take their printed classes."""
    for cls in classes:
        for path in cls.instances:
            module = model.get_submodule(path)
            module.__class__ = found[cls.name]
            if cls.uses_axis:
                module.tensor = axis


def float64_model(file: ModelFile) -> nn.Module:
    """Build a model in float64, always with the same weights."""
    torch.manual_seed(3)
    model = file.build_model().double()
    assert isinstance(model, nn.Module)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.abs().max() == 0:
                parameter.normal_(std=0.05)
    return model.train()


def float64_batch(file: ModelFile, rows: int = 4) -> dict[str, Tensor]:
    """Return a batch of a model in float64, always the same."""
    torch.manual_seed(5)
    batch: dict[str, Tensor] = file.example_batch(rows)
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def accepted(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a batch that a model's forward takes."""
    names = inspect.signature(type(model).forward).parameters
    return {key: value for key, value in batch.items() if key in names}


def loss_of(file: ModelFile, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a whole model."""
    outputs = model(**accepted(model, batch))
    loss = outputs if file.loss is None else file.loss(outputs, batch)
    return checked_loss(loss)


def stage_modules(
    model: nn.Module, opened: OpenedSource, found: Mapping[str, Any], axis: Any = None
) -> list[nn.Module]:
    """Return one module for each stage, which share the model's modules."""
    parts = []
    for stage in opened.stages:
        part = copy.copy(model)
        use_classes(part, [stage.cls], found, axis)
        for key, value in stage.bounds:
            setattr(part, key, value)
        parts.append(part)
    return parts


def staged_loss(
    file: ModelFile, parts: Sequence[nn.Module], opened: OpenedSource, batch: dict[str, Tensor]
) -> Tensor:
    """Run the stages one after the other and return the loss."""
    values: tuple[Any, ...] = ()
    for part, stage in zip(parts, opened.stages, strict=True):
        assert len(values) == len(stage.takes)
        out = part(*values, **batch)
        values = out if isinstance(out, tuple) else (out,)
        given = [crossing.has_gradient for crossing in stage.gives] or [True]
        assert [value.requires_grad for value in values] == given
    if opened.stages[-1].returns_loss:
        loss: Tensor = values[0]
        return loss
    outputs = values[0] if len(values) == 1 else values
    return checked_loss(outputs if file.loss is None else file.loss(outputs, batch))


Result = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


def result(model: nn.Module, compute: Callable[[], Tensor]) -> Result:
    """Return loss, gradients and buffers after one backward, with a fixed seed."""
    torch.manual_seed(11)
    loss = compute()
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, dict(model.named_buffers())


def assert_same(found: Result, expected: Result) -> None:
    """Compare loss, gradients and buffers to 1e-12."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-11, atol=1e-12, msg=name)


@cache
def original(name: str, *arguments: str) -> tuple[nn.Module, Result]:
    """Return a model as it was before, and what it computes."""
    file = zoo_file(name, *arguments)
    model = float64_model(file)
    before = copy.deepcopy(model)
    batch = float64_batch(file)
    return before, result(model, lambda: loss_of(file, model, batch))
