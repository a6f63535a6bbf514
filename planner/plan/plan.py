"""The types of a plan: everything that emission, comparison and explanation need."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.shape import kinds_of_blocks
from autopar.planner.costs.prediction import Arrangement, MemoryPrediction, Prediction, Recompute
from autopar.planner.files import (
    Bytes,
    Degree,
    Elements,
    FigureNumber,
    Number,
    Rows,
    Seconds,
    Share,
    SomeBytes,
    SomeSeconds,
)
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import OpLayout, ParameterLayout
from autopar.planner.model.functions import sources
from autopar.planner.model.guard import import_name
from autopar.planner.model.model_file import ModelFile
from autopar.planner.plan.declared.constraints import Declared

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that was planned for; `spec` is path.py or path.py:factory as the user gave it."""

    name: str
    spec: str
    arguments: tuple[tuple[str, str], ...]
    source_hash: str
    parameters: Elements
    has_loss: bool  # the model file's own loss function; the model returns its loss otherwise
    has_dataset: bool
    has_optimizer: bool
    has_scheduler: bool
    tokens_per_row: Rows  # 1 where rows have no sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachines:
    """The cluster that was planned for, in short."""

    devices: Degree
    nodes: Degree
    device: str
    memory_bytes: SomeBytes  # of the smallest device
    limit_bytes: SomeBytes  # that a rank may use of it
    usd_per_hour: FigureNumber | None
    backend: str  # nccl, gloo, …
    content_hash: str
    limits: tuple[tuple[str, SomeBytes], ...] = ()  # of each device by name, where they are unlike


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """Consecutive layers, where they run, and what each computes again."""

    rank: Number  # on the pipeline axis
    first: Number
    count: Degree
    recompute: tuple[Recompute, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How much of the space was looked at, and how far the choice can be from the best."""

    enumerated: Elements
    pruned: Elements  # as no better than the best plan, or than one with fewer devices
    solved: Elements
    infeasible: Elements  # for memory
    programs: Elements  # integer programs
    solver: str
    bound_seconds: Seconds
    gap: Share
    search_seconds: Seconds
    is_complete: bool  # False when the time limit came first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another plan that was solved, and what sets it apart."""

    arrangement: Arrangement
    recompute: str  # "none", "selective", "full" or a mix such as "full 20/32"
    step_seconds: SomeSeconds
    mfu: FigureNumber
    device_bytes: Bytes
    communication_seconds: Seconds  # exposed
    idle_seconds: Seconds
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to train one model on one cluster.

    `layouts[c][i]` is for the op at position i of the layers of class c (planner.layers), which
    are the same for every layer of the class, in the axes of its first layer. `crossing` has the
    layout in which a tensor passes from the layer that makes it, and converts it, to others.
    """

    format: int
    autopar: str  # version
    model: Model
    machines: PlannedMachines
    objective: str
    constraints: tuple[Declared, ...]  # by the user; of several for one place, the last
    arrangement: Arrangement
    stages: tuple[PlannedStage, ...]
    layouts: tuple[tuple[OpLayout, ...], ...]
    parameters: tuple[ParameterLayout, ...]
    crossing: tuple[ParameterLayout, ...]
    prediction: Prediction
    proof: Proof
    runners_up: tuple[RunnerUp, ...]
    cluster: Cluster
    graph: Graph
    fastest: RunnerUp | None = None  # where the plan is a simpler one within the tolerance of it

    @property
    def slower_by(self) -> float:
        """How much longer a step is than that of the fastest plan, as a share of that."""
        if self.fastest is None:
            return 0.0
        return self.prediction.step_seconds / self.fastest.step_seconds - 1

    def limit_bytes(self, rank: int) -> int:
        """Return what a pipeline rank may use: the least that any of its devices allows."""
        limits = dict(self.machines.limits)
        if not limits:
            return self.machines.limit_bytes
        kinds = kinds_of_blocks(self.cluster, self.arrangement.pipeline)
        return min(limits[device.name] for device in kinds[rank])

    def memory_bytes(self, rank: int) -> int:
        """Return the memory of the smallest device of a pipeline rank."""
        if not self.machines.limits:
            return self.machines.memory_bytes
        kinds = kinds_of_blocks(self.cluster, self.arrangement.pipeline)
        return min(device.memory_bytes for device in kinds[rank])

    @property
    def fullest(self) -> tuple[int, MemoryPrediction]:
        """The pipeline rank that is nearest to its limit, and what it holds."""
        stages = zip(self.stages, self.prediction.stages, strict=True)
        held = [(stage.rank, predicted.memory) for stage, predicted in stages]
        return max(held, key=lambda pair: pair[1].device_bytes / self.limit_bytes(pair[0]))

    @property
    def layer_modes(self) -> tuple[Recompute, ...]:
        """How each layer is recomputed, from the first layer to the last."""
        stages = sorted(self.stages, key=lambda stage: stage.first)
        return tuple(mode for stage in stages for mode in stage.recompute)


def model_facts(
    model_file: ModelFile, graph: Graph, *, spec: str, arguments: Sequence[str]
) -> Model:
    """Return the facts; `spec` and `arguments` ("key=value") are as the person gave them."""
    pairs = (argument.partition("=") for argument in arguments)
    return Model(
        name=model_file.name,
        spec=spec,
        arguments=tuple((key, value) for key, _, value in pairs),
        source_hash=source_hash(model_file.path),
        parameters=sum(graph.tensors[p.name].numel.at(1) for p in graph.parameters),
        has_loss=model_file.loss is not None,
        has_dataset=model_file.build_dataset is not None,
        has_optimizer=model_file.build_optimizer is not None,
        has_scheduler=model_file.build_scheduler is not None,
        tokens_per_row=graph.tokens_per_row,
    )


def source_hash(path: Path) -> str:
    """Return 64 hexadecimal digits of a model file and of the files beside it that it imports."""
    digest, folder = hashlib.sha256(), import_name(path).folder
    for file in sources(path):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
