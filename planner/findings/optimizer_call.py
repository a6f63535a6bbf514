"""Calls a model file's build_optimizer on stand-ins, by what the name of its argument asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import AdamW

from autopar.planner.graph import Graph
from autopar.planner.model.model_file import ModelFile

Make: TypeAlias = Callable[[Sequence[nn.Parameter]], Any]

NAME = "stand_in_for"  # an attribute of a stand-in


def make_on_stand_ins(model_file: ModelFile, graph: Graph, model: nn.Module | None) -> Make:
    """Return what makes the optimizer of stand-ins: given these, named, or hung into the model."""
    build = model_file.build_optimizer
    if build is None:
        return lambda parameters: AdamW(parameters)
    asked = next(iter(inspect.signature(build).parameters), "")
    if asked == "named_parameters":
        return lambda parameters: build([(getattr(one, NAME), one) for one in parameters])
    if asked == "model" and model is not None:
        aliases = {one.name: one.aliases for one in graph.parameters}
        return lambda parameters: build(_holding(model, parameters, aliases))
    return build


def _holding(
    model: nn.Module, parameters: Sequence[nn.Parameter], aliases: dict[str, tuple[str, ...]]
) -> nn.Module:
    """Return the model with stand-ins for these parameters, and without any other."""
    given = {alias: one for one in parameters for alias in aliases[getattr(one, NAME)]}
    given |= {getattr(one, NAME): one for one in parameters}
    for prefix, module in model.named_modules():
        for name in module._parameters:
            module._parameters[name] = given.get(f"{prefix}.{name}" if prefix else name)
    return model
