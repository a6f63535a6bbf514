"""Takes a model file through plan, script and training, and says what became of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.codegen.proof.plain import TrainedAlone, task_of, train_alone
from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.ops.case import LocalShapes, forward_flops
from autopar.planner.errors import AutoparError
from autopar.planner.findings.optimizer import optimizer_traits
from autopar.planner.findings.rows import meeting_rows, norm_of_rows
from autopar.planner.layers import Layers, find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.declared.constraints import constraints_of as given_constraints
from autopar.planner.plan.declared.file import gathered_constraints, parse_constraints
from autopar.planner.plan.declared.limits import rows_at_once, with_optimizer
from autopar.planner.plan.files.document import parse_plan, plan_text
from autopar.planner.plan.plan import BatchFacts, Plan, model_facts, with_graph
from autopar.planner.plan.search.search import search
from autopar.planner.plan.search.space import check_degrees
from autopar.planner.plan.telling.words import statistics_apart
from autopar.planner.precision import Precision
from autopar.planner.rules.table import rule_of
from autopar.planner.trace import trace_for_rows
from tests.codegen.equality import compare, trained_by_script
from tests.field.cells import Kind, Subject
from tests.runtime.processes import run_on_ranks

STEPS = 3
TOLERANCE = 1e-9
HALF_TOLERANCE = 2.0  # times as far from fp32 as one process in bf16 is
ROUNDING = 2**-8  # of numbers in bf16
DEVICE_BYTES = 16 * 2**30
_SPLIT = '[[splits]]\naxis = "{axis}"\nmodules = "*"\nrule = "require"\n'
SLOWER = 100  # devices, so that a tiny model is to them what a large one is to GPUs


class ExitReason(StrEnum):
    """What becomes of a cell."""

    EQUAL = "equal"
    REFUSED = "refused"
    TOLD = "told"  # by `autopar plan`: parts of a batch whose rows meet have a loss of their own
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What became of one subject under one kind of plan.

    `divided` is the share of matrix FLOPs that tensor ranks share, where there are such ranks.
    """

    verdict: ExitReason
    detail: str
    arrangement: str = ""
    divided: float | None = None


def cell(subject: Subject, kind: Kind) -> Cell:
    """Plan, emit and train one cell; every failure is a result."""
    try:
        plan = plan_of(subject, kind)
        if _is_told(plan):
            return Cell(verdict=ExitReason.TOLD, detail="the rows meet, and a pin parts the batch")
        largest, name = _half_apart(plan) if kind.precision.is_half else _apart(plan)
    except AutoparError as refusal:
        told = " · ".join(part for part in (refusal.found, refusal.expected, refusal.fix) if part)
        told = re.sub(r"\S*/site-packages/", "", told)  # where packages lie here says nothing
        return Cell(verdict=ExitReason.REFUSED, detail=told)
    except Exception as failure:
        return Cell(verdict=ExitReason.WRONG, detail=cause_of(failure))
    is_half = kind.precision.is_half
    is_equal = largest <= (HALF_TOLERANCE if is_half else TOLERANCE)
    shown = f"{largest:.2f} ×" if is_half else f"{largest:.1e}"
    return Cell(
        verdict=ExitReason.EQUAL if is_equal else ExitReason.WRONG,
        detail=shown + ("" if is_equal else f" {name}"),
        arrangement=arrangement_words(plan),
        divided=divided_share(plan, *_parts(subject, _rows(subject, kind), kind.precision)[2:4]),
    )


def _is_told(plan: Plan) -> bool:
    """Whether a pin splits a batch whose rows meet, or whose statistics batch norms take."""
    own = plan.arrangement
    meets = own.data * own.microbatches > 1 and meeting_rows(plan.graph) is not None
    return meets or bool(statistics_apart(plan))


def _apart(plan: Plan) -> tuple[float, str]:
    """Return the largest difference from one process, both in float64, and what has it."""
    comparison = compare(plan, steps=STEPS)
    if comparison.faults:
        return math.inf, " · ".join(comparison.faults)
    worst = max(
        (comparison.loss, comparison.norm, comparison.gradient, comparison.parameter),
        key=lambda one: (one.largest != one.largest, one.largest),
    )
    return worst.largest, worst.name


def _half_apart(plan: Plan) -> tuple[float, str]:
    """Return how many times as far from fp32 a script in bf16 is as one process in bf16, and where.

    That is of a loss, or of the first gradient of a parameter. What one process happens to hit
    counts as missed by a rounding, or by the share that it misses of all gradients together.
    """
    exact, half = (_alone(plan, dtype) for dtype in ("float32", "bfloat16"))
    found = trained_by_script(plan, steps=STEPS, data="dataset", dtype="bfloat16")
    losses = (
        (f"the loss of step {step}", _times_as_far(*map(torch.tensor, three), share=ROUNDING))
        for step, three in enumerate(zip(found.losses, half.losses, exact.losses, strict=True))
    )
    wide = {name: (half.gradients[name], value) for name, value in exact.gradients.items()}
    missed = sum(float((own - value).square().sum()) for own, value in wide.values())
    share = math.sqrt(missed / sum(float(value.square().sum()) for _, value in wide.values()))
    gradients = (
        (name, _times_as_far(found.gradients[name], *two, share=share))
        for name, two in wide.items()
    )
    name, worst = max((*losses, *gradients), key=lambda one: (one[1] != one[1], one[1]))
    return worst, name


def _alone(plan: Plan, dtype: str) -> TrainedAlone:
    task = task_of(plan, plan.model.spec, steps=STEPS, dtype=dtype)
    (found,) = run_on_ranks(train_alone, 1, task)
    return found


def _times_as_far(found: Tensor, half: Tensor, exact: Tensor, *, share: float) -> float:
    missed = (half - exact).norm() + share * exact.norm()
    return float((found - exact).norm() / missed) if missed else 0.0


def cause_of(failure: Exception) -> str:
    """Return the first error of a chain, which a rank tells as text."""
    text = f"{type(failure).__name__}: {failure}"
    found = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception)\b(?:: .*)?$", str(failure), flags=re.M)
    return found[0] if found else text


@cache
def _parts(subject: Subject, rows: int | None, precision: Precision) -> tuple[Any, ...]:
    file = load_model_file(str(subject.path), subject.arguments)
    graph = trace_for_rows(file, rows, precision)
    axes = infer_axes(graph)
    return file, graph, axes, find_layers(graph, axes)


def _rows(subject: Subject, kind: Kind) -> int | None:
    """Return the rows to trace for, where the model takes one number of them alone."""
    is_free = _parts(subject, None, kind.precision)[1].fixed_batch is None
    return None if is_free else rows_at_once(constraints_of(subject, kind))


@cache
def plan_of(subject: Subject, kind: Kind) -> Plan:
    """Return the plan of a cell as a file has it, or raise what the planner refuses it with."""
    file, graph, axes, layers = _parts(subject, _rows(subject, kind), kind.precision)
    spec = str(subject.path)
    facts = model_facts(file, graph, spec=spec, arguments=subject.arguments)
    if norm_of_rows(graph) is not None:  # in several microbatches it trains as no one device does
        kind = replace(kind, microbatch=None)
    constraints = with_optimizer(constraints_of(subject, kind), optimizer_traits(file, graph))
    check_degrees(kind.ranks, constraints, BatchFacts.of(graph))
    plan = search(graph, axes, layers, facts, cluster_of(kind), constraints)
    return with_graph(parse_plan(plan_text(plan), where="plan.json"), graph)


def cluster_of(kind: Kind) -> Cluster:
    """Return processes of an ordinary machine.

    Where tensor ranks are demanded they compute slowly and talk for nothing, so that what can be
    split is, as it would be in a model that is not tiny.
    """
    cluster = choose_cluster(kind.ranks, "cpu")
    (node,) = cluster.nodes
    device, link = replace(node.device, memory_bytes=DEVICE_BYTES), node.link
    if kind.tensor is not None:
        device = replace(
            device,
            memory_bytes_per_second=device.memory_bytes_per_second / SLOWER,
            peaks=tuple((dtype, peak / SLOWER) for dtype, peak in device.peaks),
        )
    return replace(cluster, nodes=(replace(node, device=device, link=link),))


def constraints_of(subject: Subject, kind: Kind) -> Constraints:
    """Return what a constraints file and the command line would declare for this kind of plan."""
    degrees = {"pp": kind.pipeline, "dp": kind.data, "tp": kind.tensor}
    pins: dict[str, object] = dict.fromkeys(degrees, 1) if any(degrees.values()) else {}
    rest = {
        "zero": None if kind.zero is None else int(kind.zero),
        "microbatch": kind.microbatch,
        "schedule": kind.schedule,
        "stages_per_rank": kind.stages_per_rank,
    }
    pins |= {key: value for key, value in (degrees | rest).items() if value is not None}
    given = gathered_constraints(
        [f"{key}={value}" for key, value in pins.items()],
        {
            "global_batch": str(subject.global_batch),
            "precision": str(kind.precision),
            "compile": str(kind.compile),
        },
        None,
    )
    rule = f'[[recompute]]\nmodules = "*"\nmode = "{kind.recompute}"\n' if kind.recompute else ""
    rule += _SPLIT.format(axis=kind.split) if kind.split else ""
    rules = parse_constraints(rule, where="constraints.toml")
    return given_constraints((*rules, *given.declared))


def arrangement_words(plan: Plan) -> str:
    """Return the degrees of a plan, in short."""
    own = plan.arrangement
    return f"pp {own.pipeline} · dp {own.data} · tp {own.tensor}"


def divided_share(plan: Plan, axes: GraphAxes, layers: Layers) -> float | None:
    """Return the share of matrix FLOPs that is split on the tensor axis."""
    if plan.arrangement.tensor == 1:
        return None
    batch = plan.arrangement.microbatch
    divided = total = 0
    for layer in layers.layers:
        for op, layout in zip(layer.ops, plan.layouts[layer.layer_class], strict=True):
            shapes = LocalShapes(op, plan.graph, axes.ops[op.name], batch=batch)
            rule = rule_of(op.target)
            if rule is not None and rule.computes is not None:
                continue  # no product of letters: a transform, a factor, a recurrent cell
            flops = forward_flops(shapes)
            total += flops
            divided += flops if layout.letter else 0
    return divided / total if total else None
