"""Plans a model for one device, writes its script, and returns what the plan predicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.codegen.emit import write_script
from autopar.planner.annotate import annotated_ops
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import (
    MemoryPrediction,
    Offload,
    Prediction,
    Recompute,
    TimeTerm,
    Zero,
)
from autopar.planner.layers import Compile, find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import Constraints, RecomputePin
from autopar.planner.plan.plan import Plan, model_facts
from autopar.planner.plan.search.search import search
from autopar.planner.precision import Float8, Precision
from autopar.planner.profile.measured import MeasuredFile
from autopar.planner.profile.profile import ProfileRequest, local_device, profile
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import rule_of
from autopar.planner.trace import trace

ZOO = Path(__file__).parents[2] / "models_zoo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and the rows of its step, which is one microbatch."""

    name: str
    file: str
    arguments: tuple[str, ...]
    rows: int
    compile: Compile = Compile.NONE
    float8: Float8 = Float8.NONE
    offload: Offload = Offload.NONE
    zero: Zero = Zero.NONE  # with offload, PARAMETERS fetches each layer from the host

    @property
    def spec(self) -> str:
        """The model as on a command line."""
        return str(ZOO / self.file)

    @property
    def is_profiled(self) -> bool:
        """Whether a profile can improve the prediction: it times neither inductor nor offload."""
        return self.compile is Compile.NONE and self.offload is Offload.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The predictions for a case's script."""

    step_seconds: float
    terms: tuple[TimeTerm, ...]
    memory: MemoryPrediction
    seconds_by_kind: Mapping[str, float]  # of the ops on the device, by formulas
    flops: float


def planned(case: Case, device: str, folder: str) -> Planned:
    """Plan a case by formulas alone, and write its script into a folder."""
    file = load_model_file(case.spec, case.arguments)
    graph = trace(file, precision=Precision.BF16)
    plan = _plan(case, device, None)
    write_script(plan, Path(folder))
    (node,) = choose_cluster(1, device).nodes
    by_kind = defaultdict[str, float](float)
    ops = annotated_ops(graph, batch=case.rows, precision=Precision.BF16, device=node.device)
    for op in ops:
        by_kind[_kind(op.target)] += op.count * (op.forward_seconds + op.backward_seconds)
    return _told(plan.prediction, by_kind)


def planned_by_profile(case: Case, device: str, seconds: float) -> Planned:
    """Measure the ops of a case on this machine's device, and plan with these times."""
    file = load_model_file(case.spec, case.arguments)
    graph = trace(file, precision=Precision.BF16)
    axes = infer_axes(graph)
    request = ProfileRequest(
        batches=(case.rows,),
        degrees=(1,),
        precision=Precision.BF16,
        total_seconds=seconds,
        op_seconds=seconds / 10,
    )
    found = profile(graph, axes, find_layers(graph, axes), request).measured
    return _told(_plan(case, device, found).prediction, {})


def device_here() -> str:
    """Return the planner's name for this machine's device."""
    return local_device().name


def _plan(case: Case, device: str, measured: MeasuredFile | None) -> Plan:
    file = load_model_file(case.spec, case.arguments)
    graph = trace(file, precision=Precision.BF16)
    axes = infer_axes(graph)
    facts = model_facts(file, graph, spec=case.spec, arguments=case.arguments)
    constraints = replace(
        Constraints(precision=Precision.BF16, global_batch=case.rows, compile=case.compile),
        float8=case.float8,
        offloads=(case.offload,),
        zero_levels=(case.zero,),
        microbatch=case.rows,
        recompute=(RecomputePin(modules="*", mode=Recompute.NONE),),
    )
    cluster = choose_cluster(1, device)
    return search(
        graph, axes, find_layers(graph, axes), facts, cluster, constraints, measured=measured
    )


def _kind(target: str) -> str:
    rule = rule_of(target)
    is_product = bool(rule.factors) and rule.kind is OpKind.OTHER
    return "matrix product" if is_product else rule.kind.value or "elementwise and others"


def _told(prediction: Prediction, by_kind: Mapping[str, float]) -> Planned:
    return Planned(
        step_seconds=prediction.step_seconds,
        terms=prediction.terms,
        memory=prediction.stages[0].memory,
        seconds_by_kind=dict(by_kind),
        flops=prediction.model_flops,
    )
