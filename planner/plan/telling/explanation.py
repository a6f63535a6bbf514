"""Explains a plan: its step, its bounds, its memory, its layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.prediction import MemoryPrediction, Prediction
from autopar.planner.graph.layouts import (
    WHOLE,
    Layout,
    LayoutKind,
    OpLayout,
    ParameterLayout,
    conversion,
)
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Layer, Layers
from autopar.planner.plan.plan import (
    ClassLayouts,
    ConversionLine,
    RunnerUp,
    SplitLine,
    StoredPlan,
)
from autopar.planner.plan.telling.words import added_up, layout_words, other_words


def class_layouts(
    layouts: Sequence[Sequence[OpLayout]],
    parameters: Sequence[ParameterLayout],
    axes: GraphAxes,
    layers: Layers,
) -> tuple[ClassLayouts, ...]:
    """Return a plan's splits in each class of layers, as the class's first layer has them."""
    produced = _produced(layouts, parameters, axes, layers)
    return tuple(
        _class(one.name, len(one.layers), layers.layers[one.layers[0]], own, produced, axes)
        for one, own in zip(layers.classes, layouts, strict=True)
    )


def _class(
    name: str,
    count: int,
    layer: Layer,
    layouts: Sequence[OpLayout],
    produced: Mapping[str, Layout],
    axes: GraphAxes,
) -> ClassLayouts:
    splits = [
        _split_line(op, layout, layer, axes)
        for op, layout in zip(layer.ops, layouts, strict=True)
        if layout.letter
    ]
    return ClassLayouts(
        name=name,
        first=layer.call,
        layers=count,
        ops=len(layer.ops),
        splits=tuple(splits),
        conversions=tuple(_conversions(layer, layouts, produced, axes)),
    )


def _split_line(op: Op, layout: OpLayout, layer: Layer, axes: GraphAxes) -> SplitLine:
    return SplitLine(
        module=_inner(op.call, layer.call),
        op=op_name(op.target),
        axis=axes.names.get(layout.axis, layout.axis),
        gives=", ".join(dict.fromkeys(layout_words(_named(one, axes)) for one in layout.gives)),
    )


def _conversions(
    layer: Layer, layouts: Sequence[OpLayout], produced: Mapping[str, Layout], axes: GraphAxes
) -> Iterator[ConversionLine]:
    """Yield each conversion once, even if several ops use its result."""
    seen: set[tuple[str, Layout]] = set()
    for op, layout in zip(layer.ops, layouts, strict=True):
        for tensor, need in zip(op.inputs, layout.needs, strict=True):
            before, after = produced.get(tensor, WHOLE), _named(need, axes)
            made = conversion(before, after)
            if made is None or (tensor, after) in seen:
                continue
            seen.add((tensor, after))
            yield ConversionLine(
                module=_inner(op.call, layer.call),
                tensor=tensor,
                produced=layout_words(before),
                needed=layout_words(after),
                forward=str(made.forward),
                backward=str(made.backward),
            )


def _produced(
    layouts: Sequence[Sequence[OpLayout]],
    parameters: Sequence[ParameterLayout],
    axes: GraphAxes,
    layers: Layers,
) -> Mapping[str, Layout]:
    """Return the layout of every tensor before conversions, with names of axes.

    Equal layers have axes of their own with the same names, so layouts are compared by name.
    """
    produced = {one.name: _named(one.layout, axes) for one in parameters}
    for layer in layers.layers:
        for op, layout in zip(layer.ops, layouts[layer.layer_class], strict=True):
            given = (_named(one, axes) for one in layout.gives)
            produced.update(zip(op.outputs, given, strict=True))
    return produced


def _named(layout: Layout, axes: GraphAxes) -> Layout:
    if layout.kind is not LayoutKind.SPLIT:
        return layout
    return Layout(layout.kind, axes.names.get(layout.axis, layout.axis), layout.dim)


def _inner(call: str, layer: str) -> str:
    """Return the path of a call within its layer."""
    return call.removeprefix(layer).removeprefix(".") if call.startswith(layer) else call


def op_name(target: str) -> str:
    """Return the plain name of an op: "aten.linear.default" is "linear"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


class StepPart(StrEnum):
    """What a device does in a part of the step: it works, or it waits."""

    COMPUTE = "compute"
    COMMUNICATION = "exposed communication"
    BUBBLE = "pipeline bubble"
    OVERHEAD = "host overhead"


TERM_PARTS: Mapping[str, StepPart] = MappingProxyType(
    {
        "compute": StepPart.COMPUTE,
        "recompute": StepPart.COMPUTE,
        "optimizer": StepPart.COMPUTE,
        "tensor communication": StepPart.COMMUNICATION,
        "exposed data parallel": StepPart.COMMUNICATION,
        "exposed host copies": StepPart.COMMUNICATION,
        "exposed activation copies": StepPart.COMMUNICATION,
        "tied weights": StepPart.COMMUNICATION,
        "outer step": StepPart.COMMUNICATION,
        "pipeline bubble": StepPart.BUBBLE,
    }
)
MEMORY_CATEGORIES = (
    ("parameters", "parameter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activation_bytes"),
    ("work space", "transient_bytes"),
    ("temporary copies", "unsharded_bytes"),  # gathered parameters, gradients before they are added
    ("buffers", "communication_bytes"),
    ("fragments", "margin_bytes"),
    ("context", "context_bytes"),
)
_LEAST_NAMED = 0.005  # of the step: terms below it are not named
_TIGHT = 0.9  # of the limit: above it, memory may have excluded faster plans
_HELP: Mapping[StepPart, str] = MappingProxyType(
    {
        StepPart.COMPUTE: "a faster device would help, a faster network would not",
        StepPart.COMMUNICATION: "a faster network, or more work for each byte, would help most",
        StepPart.BUBBLE: "more microbatches or fewer pipeline ranks would help most",
        StepPart.OVERHEAD: "larger microbatches would help most: the host cannot keep up",
    }
)
_HELP_RECOMPUTING = (
    "a faster device or fewer recomputed layers would help, a faster network would not"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """A part of the step."""

    part: StepPart
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The memory of a stage's rank, in the order of MEMORY_CATEGORIES."""

    stage: int
    categories: tuple[tuple[str, int], ...]
    device_bytes: int
    share_of_limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that `autopar explain` prints besides the plan's own figures."""

    shares: tuple[StepShare, ...]
    bound: StepPart
    reasons: tuple[str, ...]
    critical_stage: int
    memory: tuple[StageMemory, ...]
    layouts: tuple[ClassLayouts, ...]
    proof: str


def explain(plan: StoredPlan) -> Explanation:
    """Return what bounds a plan's step and memory, and how well it is proved."""
    shares = shares_of(plan.prediction)
    memory = tuple(
        _stage_memory(number, stage.memory, plan.limit_bytes(plan.stages[number].rank))
        for number, stage in enumerate(plan.prediction.stages)
    )
    return Explanation(
        shares=shares,
        bound=max(shares, key=lambda share: share.seconds).part,
        reasons=_reasons(plan, shares),
        critical_stage=critical_stage(plan.prediction),
        memory=memory,
        layouts=plan.classes,
        proof=proof_line(plan),
    )


def shares_of(prediction: Prediction) -> tuple[StepShare, ...]:
    """Return the parts of a step, summed over its terms."""
    return tuple(
        StepShare(part=part, seconds=seconds, share=seconds / prediction.step_seconds)
        for part in StepPart
        for seconds in [part_seconds(prediction, part)]
    )


def part_seconds(prediction: Prediction, part: StepPart) -> float:
    """Return the seconds of one part of the step."""
    return sum(
        term.seconds
        for term in prediction.terms
        if TERM_PARTS.get(term.name, StepPart.OVERHEAD) is part
    )


def term_percents(prediction: Prediction) -> tuple[int, ...]:
    """Return each term's percentage of the step; they add up to 100."""
    return added_up([term.seconds / prediction.step_seconds for term in prediction.terms])


def critical_stage(prediction: Prediction) -> int:
    """Return the stage that others wait for: the slowest one of the rank that idles least."""
    stages = prediction.stages
    return min(
        range(len(stages)),
        key=lambda i: (
            stages[i].idle_seconds,
            -(stages[i].forward_seconds + stages[i].backward_seconds),
        ),
    )


def _stage_memory(number: int, memory: MemoryPrediction, limit_bytes: int) -> StageMemory:
    return StageMemory(
        stage=number,
        categories=tuple((name, getattr(memory, field)) for name, field in MEMORY_CATEGORIES),
        device_bytes=memory.device_bytes,
        share_of_limit=memory.device_bytes / limit_bytes,
    )


def _reasons(plan: StoredPlan, shares: tuple[StepShare, ...]) -> tuple[str, ...]:
    most = max(shares, key=lambda share: share.seconds)
    rank, memory = plan.fullest
    used, limit = memory.device_bytes, plan.limit_bytes(rank)
    reasons = [f"{part_words(plan.prediction, most.part)}: {_help(plan.prediction, most.part)}"]
    state = "so memory bounds the choice too" if used > _TIGHT * limit else "so memory is no limit"
    reasons.append(
        f"the fullest device holds {bytes_text(used)} of {bytes_text(limit)} "
        f"({used / limit:.0%}), {state}"
    )
    reasons += host_words(plan)
    if plan.runners_up:
        reasons.append(_against(plan, plan.runners_up[0]))
    return tuple(reasons)


def host_words(plan: StoredPlan) -> Iterator[str]:
    """Yield what lies in the host's memory, if anything."""
    needed = max(one.memory.host_bytes for one in plan.prediction.stages)
    if not needed:
        return
    arranged = plan.arrangement
    parts = ["parameters"] * arranged.shards_on_host
    parts += ["gradients", "fp32 weights", "optimizer states"] * arranged.offload.has_states
    parts += ["the state of the outer optimizer"] * arranged.offload.has_outer
    parts += ["what layers save for the backward"] * any(m.is_on_host for m in plan.layer_modes)
    *first, last = parts
    listed = f"{', '.join(first)} and {last}" if first else last
    yield f"the host holds {bytes_text(needed)} for each device: {listed}"


def part_words(prediction: Prediction, part: StepPart) -> str:
    """Return a part's percentage of the step, and its terms."""
    whole = prediction.step_seconds
    names = [
        term.name
        for term in prediction.terms
        if TERM_PARTS.get(term.name, StepPart.OVERHEAD) is part
        and term.seconds >= _LEAST_NAMED * whole
    ]
    added = " + ".join(names)
    words = added if part.value in names else f"{part} ({added})"
    takes = "takes" if len(names) == 1 else "take"
    return f"{words} {takes} {part_seconds(prediction, part) / whole:.0%} of the step"


def _help(prediction: Prediction, part: StepPart) -> str:
    recomputes = any(term.name == "recompute" and term.seconds for term in prediction.terms)
    return _HELP_RECOMPUTING if part is StepPart.COMPUTE and recomputes else _HELP[part]


def _against(plan: StoredPlan, other: RunnerUp) -> str:
    slower = other.step_seconds - plan.prediction.step_seconds
    share = slower / plan.prediction.step_seconds
    how = f"{abs(share):.1%} {'slower' if slower >= 0 else 'faster'}"
    return (
        f"the next plan ({other_words(other.arrangement, plan.arrangement)}) takes "
        f"{seconds_text(other.step_seconds)}, {how}: {other.difference}"
    )


def proof_line(plan: StoredPlan) -> str:
    """Return what the search examined, and how far the plan may be from the best."""
    proof = plan.proof
    counts = (
        f"{proof.enumerated:,} arrangements: "
        f"{proof.pruned:,} pruned by bound, {proof.infeasible:,} too large, "
        f"{proof.solved:,} solved with {proof.programs:,} integer programs ({proof.solver})"
    )
    late = "" if proof.is_complete else "; the time limit came first"
    return f"{counts}. {_certainty(plan)}{late}. {proof.search_seconds:.1f} s"


def _certainty(plan: StoredPlan) -> str:
    """Return what is proved about the fastest plan, and the chosen plan's distance from it."""
    gap = plan.proof.gap
    if plan.fastest is None:
        if gap <= 0:
            return "No better plan exists in this space"
        return f"Certified gap {gap:.2%}: no plan is better by more than that"
    than = f"No plan in this space is faster than {seconds_text(plan.fastest.step_seconds)}"
    by = "" if gap <= 0 else f" by more than {gap:.2%}"
    return f"{than}{by}. {simpler_words(plan)}"


def simpler_words(plan: StoredPlan) -> str:
    """Return how a plan compares with the fastest one, which is less simple."""
    assert plan.fastest is not None
    if plan.fastest.arrangement == plan.arrangement:
        by = f"{plan.slower_by:.2%} longer"
        return f"This plan has simpler layouts than the fastest one, and its step is {by}"
    other = other_words(plan.fastest.arrangement, plan.arrangement)
    return f"The chosen plan is simpler than the fastest ({other}) and {plan.slower_by:.1%} slower"
