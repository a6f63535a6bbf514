"""A factory of small real plans: a graph of the zoo, replicated layouts, invented figures."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.ops.measurements import Provenance
from autopar.planner.costs.prediction import (
    Arrangement,
    CommunicationTerm,
    MemoryPrediction,
    Prediction,
    Recompute,
    StagePrediction,
    TimeTerm,
    Zero,
)
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.graph.graph import Graph, graph_hash
from autopar.planner.graph.layouts import (
    PARTIAL,
    REPLICATED,
    WHOLE,
    Layout,
    OpLayout,
    ParameterLayout,
    split,
)
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Layers, find_layers
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.plan import (
    FORMAT,
    BatchFacts,
    Model,
    Plan,
    PlannedMachines,
    PlannedStage,
    Proof,
    RunnerUp,
    StoredPlan,
)
from autopar.planner.plan.telling.explanation import class_layouts
from autopar.planner.precision import Compression, Precision
from autopar.planner.programs.layouts.edges import crossing_tensors
from autopar.planner.rules.signature import leaves
from tests.planner.subjects import zoo_graph

MIB = 2**20


def arrangement(**changes: Any) -> Arrangement:
    """Two data ranks, 4 × 2 rows each, unless changed."""
    usual = Arrangement(
        pipeline=1,
        data=2,
        tensor=1,
        shard=2,
        microbatch=2,
        microbatches=4,
        schedule=ScheduleKind.ONE_F_ONE_B,
        stages_per_rank=1,
        zero=Zero.NONE,
        bucket_bytes=25 * MIB,
        compression=Compression.NONE,
        precision=Precision.BF16,
    )
    return replace(usual, **changes)


def memory(**changes: int) -> MemoryPrediction:
    """Invented figures, 100 MiB on the device, unless changed."""
    usual = MemoryPrediction(
        parameter_bytes=20 * MIB,
        gradient_bytes=10 * MIB,
        optimizer_bytes=30 * MIB,
        activation_bytes=20 * MIB,
        transient_bytes=5 * MIB,
        unsharded_bytes=0,
        communication_bytes=5 * MIB,
        margin_bytes=4 * MIB,
        context_bytes=6 * MIB,
    )
    return replace(usual, **changes)


def prediction(stages: int = 1, **changes: Any) -> Prediction:
    """A step of 10 ms, 2 ms of it exposed communication and 1 ms idle, unless changed."""
    usual = Prediction(
        step_seconds=0.010,
        terms=(
            TimeTerm(name="compute", seconds=0.006, provenance=Provenance.MIXED),
            TimeTerm(name="recompute", seconds=0.001, provenance=Provenance.FORMULA),
            TimeTerm(name="exposed data parallel", seconds=0.002, provenance=Provenance.FORMULA),
            TimeTerm(name="pipeline bubble", seconds=0.001, provenance=Provenance.FORMULA),
        ),
        communication=(
            CommunicationTerm(
                reason="data parallel gradients",
                collective="all-reduce",
                ranks=2,
                count=1,
                payload_bytes=10 * MIB,
                seconds=0.003,
                exposed_seconds=0.002,
            ),
        ),
        stages=tuple(
            StagePrediction(
                forward_seconds=0.001,
                backward_seconds=0.002,
                idle_seconds=0.001 * (1 + number),
                in_flight=stages - number,
                memory=memory(activation_bytes=(20 + 10 * number) * MIB),
                action_seconds=(0.001, 0.002, 0.0013, 0.0009),
                transfer_seconds=0.0001 if number < stages - 1 else 0.0,
            )
            for number in range(stages)
        ),
        model_flops=10**12,
        peak_flops_per_second=5e14,
    )
    return replace(usual, **changes)


def proof(**changes: Any) -> Proof:
    """A search that looked at everything, unless changed."""
    usual = Proof(
        enumerated=120,
        pruned=90,
        solved=10,
        infeasible=2,
        programs=14,
        solver="HiGHS",
        bound_seconds=0.010,
        gap=0.0,
        search_seconds=1.5,
        is_complete=True,
    )
    return replace(usual, **changes)


def runner_up(**changes: Any) -> RunnerUp:
    """Tensor instead of data parallelism, 20 % slower, unless changed."""
    usual = RunnerUp(
        arrangement=arrangement(data=1, shard=1, tensor=2, microbatches=8),
        recompute="none",
        step_seconds=0.012,
        mfu=0.16,
        device_bytes=80 * MIB,
        communication_seconds=0.004,
        idle_seconds=0.0,
        difference="splits every layer: 2 ms more communication, 20 MiB less memory",
    )
    return replace(usual, **changes)


@cache
def parts_of(name: str, *arguments: str) -> tuple[Graph, GraphAxes, Layers]:
    """Trace a zoo model and find its axes and layers, once per process."""
    graph = zoo_graph(name, *arguments)
    axes = infer_axes(graph)
    return graph, axes, find_layers(graph, axes)


def whole_layouts(layers: Layers) -> tuple[tuple[OpLayout, ...], ...]:
    """Return the layouts of a plan that splits nothing on the tensor axis."""
    return tuple(
        tuple(
            OpLayout(
                letter="",
                axis="",
                needs=(WHOLE,) * len(op.inputs),
                gives=(WHOLE,) * len(op.outputs),
            )
            for op in layers.layers[one.layers[0]].ops
        )
        for one in layers.classes
    )


def stages_of(layers: Layers, pipeline: int) -> tuple[PlannedStage, ...]:
    """Return stages of about equally many layers, the last recomputed in full."""
    count = len(layers.layers)
    borders = [count * number // pipeline for number in range(pipeline + 1)]
    modes = [Recompute.NONE] * (pipeline - 1) + [Recompute.FULL]
    return tuple(
        PlannedStage(
            rank=rank,
            first=borders[rank],
            count=borders[rank + 1] - borders[rank],
            recompute=(modes[rank],) * (borders[rank + 1] - borders[rank]),
        )
        for rank in range(pipeline)
    )


def machines(devices: int) -> PlannedMachines:
    """So many small devices in one node."""
    return PlannedMachines(
        devices=devices,
        nodes=1,
        device="h100-sxm",
        memory_bytes=128 * MIB,
        limit_bytes=120 * MIB,
        usd_per_hour=2.5,
        backend="nccl",
        content_hash="c" * 64,
    )


def model(graph: Graph, name: str) -> Model:
    """A model file of the zoo as a plan tells it."""
    return Model(
        name=name.removesuffix(".py"),
        spec=f"models_zoo/{name}",
        arguments=(("size", "tiny"),),
        source_hash="a" * 64,
        graph_hash=graph_hash(graph),
        parameters=sum(graph.tensors[p.name].numel.at(1) for p in graph.parameters),
        has_loss=True,
        has_dataset=False,
        has_optimizer=False,
        has_scheduler=False,
        tokens_per_row=1,
        batch=BatchFacts.of(graph),
    )


def small_plan(name: str = "mnist.py", *, pipeline: int = 1, **changes: Any) -> Plan:
    """A plan of a tiny zoo model for two data ranks and some stages; any field may be changed."""
    graph, axes, layers = parts_of(name)
    usual = Plan(
        format=FORMAT,
        autopar="0.1.0",
        model=model(graph, name),
        machines=machines(2 * pipeline),
        objective="step-time",
        constraints=(declare("limits.tp", "2", origin="--max-tp", where="--max-tp"),),
        arrangement=arrangement(pipeline=pipeline),
        stages=stages_of(layers, pipeline),
        classes=class_layouts(whole_layouts(layers), (), axes, layers),
        layouts=whole_layouts(layers),
        parameters=(),
        crossing=(),
        prediction=prediction(pipeline),
        proof=proof(),
        runners_up=(runner_up(),),
        cluster=choose_cluster(2 * pipeline, "h100-sxm"),
        graph=graph,
    )
    return replace(usual, **changes)


def split_plan(name: str = "gpt2.py", axis: str = "ffn", **changes: Any) -> Plan:
    """A plan for two tensor ranks that splits every op which has an axis along it."""
    graph, axes, layers = parts_of(name)

    def layout(tensor: str) -> Layout:
        for dim, structure in enumerate(axes.dims[tensor]):
            for leaf in leaves(structure):
                if axes.names[leaf.name] == axis:
                    return split(leaf.name, dim)
        return WHOLE

    def op_layout(op: Op) -> OpLayout:
        inputs, outputs = tuple(map(layout, op.inputs)), tuple(map(layout, op.outputs))
        own = next((one.axis for one in (*inputs, *outputs) if one.axis), "")
        letters = axes.ops[op.name].letters.items()
        letter = next((x for x, dim in letters if own in {leaf.name for leaf in leaves(dim)}), "")
        is_summed = bool(own) and not any(one.axis for one in outputs)
        return OpLayout(
            letter=letter,
            axis=own if letter else "",
            needs=tuple(REPLICATED if own and one is WHOLE else one for one in inputs),
            gives=(PARTIAL,) * len(outputs) if is_summed else outputs,
        )

    layouts = tuple(
        tuple(map(op_layout, layers.layers[one.layers[0]].ops)) for one in layers.classes
    )
    parameters = tuple(
        ParameterLayout(name=one.name, layout=layout(one.name)) for one in graph.parameters
    )
    crossing = sorted(crossing_tensors(layers))
    return replace(
        small_plan(name),
        arrangement=arrangement(data=1, shard=1, tensor=2),
        classes=class_layouts(layouts, parameters, axes, layers),
        layouts=layouts,
        parameters=parameters,
        crossing=tuple(ParameterLayout(name=one, layout=layout(one)) for one in crossing),
        **changes,
    )


def without_graph(plan: StoredPlan) -> StoredPlan:
    """Return a plan as plan.json has it."""
    return StoredPlan(**{one.name: getattr(plan, one.name) for one in fields(StoredPlan)})
