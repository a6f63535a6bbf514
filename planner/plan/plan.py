"""The types of a plan: as it is stored, and with the graph that codegen needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
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
from autopar.planner.findings.rows import may_be_uneven
from autopar.planner.graph.graph import Graph, graph_hash
from autopar.planner.graph.layouts import OpLayout, ParameterLayout
from autopar.planner.model.functions import sources
from autopar.planner.model.guard import import_name
from autopar.planner.model.model_file import ModelFile
from autopar.planner.plan.declared.constraints import Declared

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Properties of a model's batch.

    `fixed` is the only number of rows that the model accepts, `fixed_at` the line that fixes it. If
    `may_be_uneven`, data ranks may have unlike numbers of rows.
    """

    fixed: Rows | None = None
    fixed_at: str = ""
    may_be_uneven: bool = False

    @classmethod
    def of(cls, graph: Graph) -> BatchFacts:
        """Return the properties of a traced model's batch."""
        return cls(
            fixed=graph.fixed_batch,
            fixed_at=graph.fixed_at,
            may_be_uneven=may_be_uneven(graph),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The planned model; `spec` is path.py or path.py:factory, as the user gave it.

    `graph_hash` is the hash of the model's graph: a plan fits no other graph.
    """

    name: str
    spec: str
    arguments: tuple[tuple[str, str], ...]
    source_hash: str
    graph_hash: str
    parameters: Elements
    has_loss: bool  # the model file has a loss function; else the model returns its loss
    has_dataset: bool
    has_optimizer: bool
    has_scheduler: bool
    tokens_per_row: Rows  # 1 if rows are no sequences
    batch: BatchFacts = BatchFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachines:
    """A summary of the planned cluster."""

    devices: Degree
    nodes: Degree
    device: str
    memory_bytes: SomeBytes  # of the smallest device
    limit_bytes: SomeBytes  # the part of it that a rank may use
    usd_per_hour: FigureNumber | None
    backend: str  # nccl, gloo, …
    content_hash: str
    limits: tuple[tuple[str, SomeBytes], ...] = ()  # per device name, if devices are unlike


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """Consecutive layers, their rank, and each layer's recompute mode."""

    rank: Number  # on the pipeline axis
    first: Number
    count: Degree
    recompute: tuple[Recompute, ...]


Stages = tuple[PlannedStage, ...]


def even_stages(stages: Stages, accepts: Callable[[Stages], bool]) -> Stages:
    """Move layers between a rank's stages until `accepts` refuses all moves that even them out."""
    while True:
        more_even = next(filter(accepts, _moves(stages)), None)
        if more_even is None:
            return stages
        stages = more_even


def _moves(stages: Stages) -> Iterator[Stages]:
    """Yield the stages after a move of layers to a smaller stage of the same rank.

    Either half of the surplus moves, or one layer.
    """
    for i, one in enumerate(stages):
        for j, other in enumerate(stages):
            surplus = one.count - other.count
            if one.rank == other.rank and surplus > 1:
                yield from (_moved(stages, i, j, n) for n in dict.fromkeys((surplus // 2, 1)))


def _moved(stages: Stages, source: int, target: int, layers: int) -> Stages:
    """Return the stages after a move of layers; each layer keeps its mode."""
    modes = [mode for stage in stages for mode in stage.recompute]
    moved = {source: -layers, target: layers}
    counts = [stage.count + moved.get(number, 0) for number, stage in enumerate(stages)]
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    return tuple(
        replace(stage, first=first, count=count, recompute=tuple(modes[first : first + count]))
        for stage, first, count in zip(stages, firsts, counts, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How much of the space was searched, and how far the choice may be from the best."""

    enumerated: Elements
    pruned: Elements  # by bounds, or because fewer devices would be as fast
    solved: Elements
    infeasible: Elements  # because of memory
    programs: Elements  # integer programs solved
    solver: str
    bound_seconds: Seconds
    gap: Share
    search_seconds: Seconds
    is_complete: bool  # False if the time limit was reached


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another solved plan, and how it differs from the chosen one."""

    arrangement: Arrangement
    recompute: str  # "none", "selective", "full" or a mix such as "full 20/32"
    step_seconds: SomeSeconds
    mfu: FigureNumber
    device_bytes: Bytes
    communication_seconds: Seconds  # exposed
    idle_seconds: Seconds
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCount:
    """The plan for one of several numbers of devices that were asked about at once."""

    arrangement: Arrangement
    step_seconds: SomeSeconds
    device_bytes: Bytes
    usd_per_hour: FigureNumber | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLine:
    """An op that is split along an axis, and its result's layout."""

    module: str  # within the layer, "" for the layer itself
    op: str
    axis: str
    gives: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionLine:
    """A tensor that is converted for an op of a module."""

    module: str
    tensor: str
    produced: str
    needed: str
    forward: str
    backward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLayouts:
    """The layouts of all layers of one class, in words."""

    name: str
    first: str  # call of its first layer
    layers: Elements
    ops: Elements
    splits: tuple[SplitLine, ...]
    conversions: tuple[ConversionLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A way to train a model on a cluster, as plan.json has it.

    `layouts[c][i]` is the layout of op i in every layer of class c (planner.layers), with the names
    of axes in the first of these layers. `classes` says the same in words. `crossing` has the
    layout of each tensor that passes between layers; the layer that makes the tensor converts it.
    Without tensor ranks, `parameters` and `crossing` are empty.
    """

    format: int
    autopar: str  # version
    model: Model
    machines: PlannedMachines
    objective: str
    constraints: tuple[Declared, ...]  # of user and model; the last of several for a place applies
    arrangement: Arrangement
    stages: tuple[PlannedStage, ...]
    classes: tuple[ClassLayouts, ...]
    layouts: tuple[tuple[OpLayout, ...], ...]
    parameters: tuple[ParameterLayout, ...]
    crossing: tuple[ParameterLayout, ...]
    prediction: Prediction
    proof: Proof
    runners_up: tuple[RunnerUp, ...]
    cluster: Cluster
    fastest: RunnerUp | None = None  # if the plan is a simpler one within the tolerance
    curve: tuple[PlannedCount, ...] = ()  # if several numbers of devices were planned

    @property
    def slower_by(self) -> float:
        """How much longer a step takes than the fastest plan's, as a fraction of the latter."""
        if self.fastest is None:
            return 0.0
        return self.prediction.step_seconds / self.fastest.step_seconds - 1

    def limit_bytes(self, rank: int) -> int:
        """Return a pipeline rank's memory limit: the least of its devices' limits."""
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
        """The pipeline rank nearest to its limit, and its memory."""
        stages = zip(self.stages, self.prediction.stages, strict=True)
        held = [(stage.rank, predicted.memory) for stage, predicted in stages]
        return max(held, key=lambda pair: pair[1].device_bytes / self.limit_bytes(pair[0]))

    @property
    def step_flops(self) -> int:
        """A step's approximate FLOPs: for each weight and token, 2 forward and 4 backward."""
        return 6 * self.model.parameters * self.model.tokens_per_row * self.arrangement.global_batch

    @property
    def layer_modes(self) -> tuple[Recompute, ...]:
        """The recompute mode of each layer, in order."""
        stages = sorted(self.stages, key=lambda stage: stage.first)
        return tuple(mode for stage in stages for mode in stage.recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(StoredPlan):
    """A plan with the graph of its model, which codegen needs."""

    graph: Graph


def with_graph(plan: StoredPlan, graph: Graph) -> Plan:
    """Return a plan with the graph of its model."""
    return Plan(**{one.name: getattr(plan, one.name) for one in fields(StoredPlan)}, graph=graph)


def model_facts(
    model_file: ModelFile, graph: Graph, *, spec: str, arguments: Sequence[str]
) -> Model:
    """Return a model's facts; `spec` and `arguments` ("key=value") are as the user gave them."""
    pairs = (argument.partition("=") for argument in arguments)
    return Model(
        name=model_file.name,
        spec=spec,
        arguments=tuple((key, value) for key, _, value in pairs),
        source_hash=source_hash(model_file.path),
        graph_hash=graph_hash(graph),
        parameters=sum(graph.tensors[p.name].numel.at(1) for p in graph.parameters),
        has_loss=model_file.loss is not None,
        has_dataset=model_file.build_dataset is not None,
        has_optimizer=model_file.build_optimizer is not None,
        has_scheduler=model_file.build_scheduler is not None,
        tokens_per_row=graph.tokens_per_row,
        batch=BatchFacts.of(graph),
    )


def source_hash(path: Path) -> str:
    """Return a hash of 64 hexadecimal digits of a model file and of the files it imports."""
    digest, folder = hashlib.sha256(), import_name(path).folder
    for file in sources(path):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
