"""Says why a plan is what it is: what its step is made of, what bounds it, where memory goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from autopar.planner.axes.infer import Axes
from autopar.planner.cluster.units import bytes_text, seconds_text
from autopar.planner.costs.prediction import MemoryPrediction, Prediction
from autopar.planner.layers import Layers
from autopar.planner.plan.plan import Plan, RunnerUp
from autopar.planner.plan.telling.percents import added_up
from autopar.planner.plan.telling.split_lines import ClassLayouts, class_layouts
from autopar.planner.plan.telling.words import other_words


class Part(StrEnum):
    """What a device does with a share of the step."""

    COMPUTE = "compute"
    COMMUNICATION = "exposed communication"
    BUBBLE = "pipeline bubble"
    OVERHEAD = "overhead"


TERM_PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "compute": Part.COMPUTE,
        "recompute": Part.COMPUTE,
        "optimizer": Part.COMPUTE,
        "tensor communication": Part.COMMUNICATION,
        "exposed data parallel": Part.COMMUNICATION,
        "pipeline bubble": Part.BUBBLE,
    }
)
MEMORY_CATEGORIES = (
    ("parameters", "parameter_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activation_bytes"),
    ("work space", "transient_bytes"),
    ("in passing", "unsharded_bytes"),  # gathered parameters, gradients until they are added
    ("buffers", "communication_bytes"),
    ("fragments", "margin_bytes"),
    ("context", "context_bytes"),
)
_TIGHT = 0.9  # of the limit: above that, memory has ruled out what would be faster
_HELP: Mapping[Part, str] = MappingProxyType(
    {
        Part.COMPUTE: "a faster device would help, a faster network would not",
        Part.COMMUNICATION: "a faster network, or more work for each byte sent, would help most",
        Part.BUBBLE: "more microbatches or fewer pipeline ranks would help most",
        Part.OVERHEAD: "larger microbatches would help most: the host cannot keep up",
    }
)
_HELP_RECOMPUTING = (
    "a faster device or fewer recomputed layers would help, a faster network would not"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One part of the step."""

    part: Part
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What the rank of one stage holds, by category in the order of MEMORY_CATEGORIES."""

    stage: int
    categories: tuple[tuple[str, int], ...]
    device_bytes: int
    share_of_limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that `autopar explain` tells, beside what the plan itself says."""

    shares: tuple[Share, ...]
    bound: Part
    reasons: tuple[str, ...]
    critical_stage: int
    memory: tuple[StageMemory, ...]
    layouts: tuple[ClassLayouts, ...]
    proof: str


def explain(plan: Plan, axes: Axes, layers: Layers) -> Explanation:
    """Return why a plan is what it is."""
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
        layouts=class_layouts(plan, axes, layers),
        proof=proof_line(plan),
    )


def shares_of(prediction: Prediction) -> tuple[Share, ...]:
    """Return what the terms of a step come to, part by part."""
    return tuple(
        Share(part=part, seconds=seconds, share=seconds / prediction.step_seconds)
        for part in Part
        for seconds in [part_seconds(prediction, part)]
    )


def part_seconds(prediction: Prediction, part: Part) -> float:
    """Return the seconds of one part of the step."""
    return sum(
        term.seconds
        for term in prediction.terms
        if TERM_PARTS.get(term.name, Part.OVERHEAD) is part
    )


def term_percents(prediction: Prediction) -> tuple[int, ...]:
    """Return what percentage of the step each term is; together they are 100."""
    return added_up([term.seconds / prediction.step_seconds for term in prediction.terms])


def critical_stage(prediction: Prediction) -> int:
    """Return the stage that the others wait for: of the rank that idles least, the slowest."""
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


def _reasons(plan: Plan, shares: tuple[Share, ...]) -> tuple[str, ...]:
    most = max(shares, key=lambda share: share.seconds)
    rank, memory = plan.fullest
    used, limit = memory.device_bytes, plan.limit_bytes(rank)
    reasons = [f"{_part_words(plan.prediction, most.part)}: {_help(plan.prediction, most.part)}"]
    state = "so memory bounds the choice too" if used > _TIGHT * limit else "so memory is no limit"
    reasons.append(
        f"the fullest device holds {bytes_text(used)} of {bytes_text(limit)} "
        f"({used / limit:.0%}), {state}"
    )
    if plan.runners_up:
        reasons.append(_against(plan, plan.runners_up[0]))
    return tuple(reasons)


def _part_words(prediction: Prediction, part: Part) -> str:
    """Say how much of the step a part is, and which of its terms that adds up."""
    own = [
        (term, percent)
        for term, percent in zip(prediction.terms, term_percents(prediction), strict=True)
        if TERM_PARTS.get(term.name, Part.OVERHEAD) is part and percent
    ]
    names = [term.name for term, _ in own]
    added = f" ({' + '.join(names)})" if names != [part.value] else ""
    return f"{part}{added} takes {sum(percent for _, percent in own)}% of the step"


def _help(prediction: Prediction, part: Part) -> str:
    recomputes = any(term.name == "recompute" and term.seconds for term in prediction.terms)
    return _HELP_RECOMPUTING if part is Part.COMPUTE and recomputes else _HELP[part]


def _against(plan: Plan, other: RunnerUp) -> str:
    slower = other.step_seconds - plan.prediction.step_seconds
    share = slower / plan.prediction.step_seconds
    how = f"{abs(share):.1%} {'slower' if slower >= 0 else 'faster'}"
    return (
        f"the next plan ({other_words(other.arrangement, plan.arrangement)}) takes "
        f"{seconds_text(other.step_seconds)}, {how}: {other.difference}"
    )


def proof_line(plan: Plan) -> str:
    """Return what the search looked at, and how far the plan can be from the best."""
    proof = plan.proof
    counts = (
        f"{proof.enumerated:,} arrangements: "
        f"{proof.pruned:,} pruned by bound, {proof.infeasible:,} too large, "
        f"{proof.solved:,} solved with {proof.programs:,} integer programs ({proof.solver})"
    )
    late = "" if proof.is_complete else "; the time limit came first"
    return f"{counts}. {_certainty(plan)}{late}. {proof.search_seconds:.1f} s"


def _certainty(plan: Plan) -> str:
    """Return what is proved of the fastest plan, and how the chosen one stands to it."""
    gap = plan.proof.gap
    if plan.fastest is None:
        if gap <= 0:
            return "No better plan exists in this space"
        return f"Certified gap {gap:.2%}: no plan is better by more than that"
    than = f"No plan in this space is faster than {seconds_text(plan.fastest.step_seconds)}"
    by = "" if gap <= 0 else f" by more than {gap:.2%}"
    return f"{than}{by}. {simpler_words(plan)}"


def simpler_words(plan: Plan) -> str:
    """Return how a plan stands to the fastest one, which is less simple."""
    assert plan.fastest is not None
    other = other_words(plan.fastest.arrangement, plan.arrangement)
    return f"The chosen plan is simpler than the fastest ({other}) and {plan.slower_by:.1%} slower"
