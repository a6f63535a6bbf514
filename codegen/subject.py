"""Turns a plan into what its script is made from: the model file again, and the opened classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autopar.codegen.forward.emit import opened_classes
from autopar.codegen.forward.modules import Modules, modules_of
from autopar.codegen.forward.opened import Opened
from autopar.codegen.forward.split import split_of
from autopar.planner.axes.infer import Axes
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.model_file import ModelFile, load_model_file
from autopar.planner.plan.model_facts import source_hash
from autopar.planner.plan.parts import check_parts
from autopar.planner.plan.plan import Plan
from autopar.runtime.initial_weights import record


class ChangedModelError(AutoparError):
    """The model file is not the one that was planned for."""

    exit_code = ExitCode.MISMATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A plan's model file, modules, axes and layers, and the source that the plan needs."""

    file: ModelFile
    graph: Graph
    modules: Modules
    axes: Axes
    layers: Layers
    opened: Opened


def subject_of(plan: Plan, folder: Path) -> Subject:
    """Load the model file of a plan; relative paths are seen from here, or else from `folder`."""
    file = _model_file(plan, folder)
    modules = modules_of(_built(file))
    split = split_of(plan, modules)
    check_parts(plan, split.layers, where="the plan")
    return Subject(
        file=file,
        graph=plan.graph,
        modules=modules,
        axes=split.axes,
        layers=split.layers,
        opened=opened_classes(plan, split),
    )


def _built(file: ModelFile) -> nn.Module:
    """Build the model without memory, as scripts do where its constructor reads what it made."""
    try:
        with torch.device("meta"):
            model: nn.Module = file.build_model()
    except InputError:
        model, _ = record(file.build_model, seed=0)
    return model


def model_spec(plan: Plan, folder: Path) -> str:
    """Return `path.py:factory` of a plan's model; relative to here, or to `folder`."""
    spec = plan.model.spec
    name = spec.rpartition(".py")[0] + ".py"
    if Path(name).is_file():
        return spec
    if (folder / name).is_file():
        return str(folder / spec)
    raise InputError(
        f"the plan is for {name}, which is neither here nor beside the plan",
        where=f"{Path.cwd()} and {folder.resolve()}",
        fix="run this where `autopar plan` was run, or plan again",
    )


def _model_file(plan: Plan, folder: Path) -> ModelFile:
    arguments = [f"{key}={value}" for key, value in plan.model.arguments]
    file = load_model_file(model_spec(plan, folder), arguments)
    check_unchanged(plan, file.path)
    return file


def check_unchanged(plan: Plan, path: Path) -> None:
    """Refuse a model file that is not the one of the plan."""
    if source_hash(path) != plan.model.source_hash:
        raise ChangedModelError(
            "the model file, or one that it imports, has changed since it was planned for",
            where=str(path),
            fix="plan again with `autopar plan`",
        )
