"""Real plans of small zoo models, with the arrangement pinned."""

from __future__ import annotations

from functools import cache
from typing import Any

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Compile, find_layers
from autopar.planner.model.model_file import ModelFile
from autopar.planner.plan.declared.constraints import Constraints, SplitRule
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.plan import Plan, model_facts
from autopar.planner.plan.search.search import search
from autopar.planner.precision import Precision
from tests.planner.subjects import zoo_file, zoo_graph


@cache
def pinned_plan(
    name: str,
    arguments: tuple[str, ...] = (),
    *,
    pipeline: int = 1,
    data: int = 1,
    tensor: int = 1,
    split: tuple[str, ...] = (),
    device: str = "cpu",
    **pins: Any,
) -> Plan:
    """Return the best plan of a zoo model with these degrees; `split` axes must be split."""
    return plan_for(
        zoo_file(name, *arguments),
        zoo_graph(name, *arguments, precision=pins.get("precision", Precision.FP32)),
        arguments,
        degrees=(pipeline, data, tensor),
        split=split,
        device=device,
        **pins,
    )


def plan_for(
    file: ModelFile,
    graph: Graph,
    arguments: tuple[str, ...],
    *,
    degrees: tuple[int, int, int],
    split: tuple[str, ...] = (),
    device: str = "cpu",
    **pins: Any,
) -> Plan:
    """Return the best plan of any model file for so many pipeline, data and tensor ranks."""
    pipeline, data, tensor = degrees
    axes = infer_axes(graph)
    usual: dict[str, Any] = {"global_batch": 8, "precision": Precision.FP32, "tolerance": 0.0}
    usual["compile"] = Compile.NONE  # scripts run here, and CPUs compile slowly
    if pipeline > 1:
        usual["schedules"] = (ScheduleKind.ONE_F_ONE_B,)
    settings = {**usual, **pins}
    batch = declare("global_batch", settings["global_batch"], origin="test", where="test")
    rules = tuple(SplitRule(modules="*", axis=axis, is_required=True) for axis in split)
    constraints = Constraints(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        splits=rules,
        declared=(batch,),
        **settings,
    )
    return search(
        graph,
        axes,
        find_layers(graph, axes),
        model_facts(file, graph, spec=str(file.path), arguments=arguments),
        choose_cluster(pipeline * data * tensor, device),
        constraints,
    )
