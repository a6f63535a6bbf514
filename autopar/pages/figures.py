"""The figures of a report that show a plan: each a chart, a sentence and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autopar.pages.charts import WIDTHS, Marks, color, marks, name, number, rule, svg
from autopar.pages.plan_page import chosen_row
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.prediction import Recompute
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.telling.explanation import MEMORY_CATEGORIES, Explanation, term_percents
from autopar.planner.plan.telling.timeline import (
    ACTION_WORDS,
    MemoryRecord,
    Timeline,
    memory_over_step,
    timeline_of,
)
from autopar.planner.plan.telling.words import arrangement_words, recompute_words

_GIB = 2**30
_MOST_RANKS = 16  # a chart shows at most so many ranks of a pipeline
_MOST_LINES = 6  # in one chart
_MOST_FRAMED = 400  # with more actions, bars are so thin that frames would cover them
_MOST_ACTIONS = 3000  # drawn, so that the page stays below 2 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A section of the report: a chart, a sentence about it, and its numbers as a table."""

    title: str
    text: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    layers: tuple[Marks, ...] = ()  # of the chart, if there is one
    height: int | Mapping[str, int] = 0  # of the chart, or of each of its rows

    @property
    def charts(self) -> Mapping[str, Markup]:
        """The chart for each width of a screen; its text is escaped by the library."""
        widths = WIDTHS.items() if self.layers else ()
        return {at: Markup(svg(self.layers, self.height, width)) for at, width in widths}


def plan_figures(plan: StoredPlan, why: Explanation) -> Iterator[Figure]:
    """Yield the figures of a plan."""
    timeline = timeline_of(plan)
    yield _plans(plan)
    yield _terms(plan, why)
    yield _schedule(plan, timeline)
    yield _memory(plan, why)
    yield _memory_over_step(plan, timeline)
    yield _layers(plan)
    yield _layouts(plan)
    yield _messages(plan)


def unit_of(seconds: float) -> tuple[float, str]:
    """Return how many units a second has, and the unit's name, for a time of this size."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _plans(plan: StoredPlan) -> Figure:
    factor, unit = unit_of(plan.prediction.step_seconds)
    found = [("chosen", chosen_row(plan)), *(("other plans", one) for one in plan.runners_up)]
    if plan.fastest is not None:
        found.insert(1, ("fastest", plan.fastest))
    cells = [
        (
            kind,
            f"{arrangement_words(one.arrangement)}; recompute {one.recompute}",
            seconds_text(one.step_seconds),
            bytes_text(one.device_bytes),
        )
        for kind, one in found
    ]
    rows = [
        {
            "kind": kind,
            "step": one.step_seconds * factor,
            "memory": one.device_bytes / _GIB,
            "words": f"{kind}: {text}: {step}, {memory}",
        }
        for (_, one), (kind, text, step, memory) in zip(found, cells, strict=True)
    ]
    encoding = {
        "x": number("step", f"step, {unit}", scale={"zero": False, "nice": True}),
        "y": number("memory", "memory of the fullest device, GiB", scale={"zero": False}),
        "color": color("kind", list(dict.fromkeys(one[0] for one in found))),
    }
    return Figure(
        title="Plans",
        text="The best plans of the search: the time of a step, and the memory that it needs.",
        layers=(marks("point", rows, encoding, size=110, filled=True, opacity=0.9),),
        height=240,
        head=("plan", "arrangement", "step", "memory"),
        rows=tuple(cells),
    )


def _terms(plan: StoredPlan, why: Explanation) -> Figure:
    factor, unit = unit_of(plan.prediction.step_seconds)
    percents = term_percents(plan.prediction)
    terms = [
        (term.name, term.seconds, percent, str(term.provenance))
        for term, percent in zip(plan.prediction.terms, percents, strict=True)
    ]
    rows = [
        {
            "term": term,
            "seconds": seconds * factor,
            "percent": f"{percent}%",
            "words": f"{term}: {seconds_text(seconds)}, {percent}% of the step",
        }
        for term, seconds, percent, _ in terms
    ]
    encoding = {"y": name("term"), "x": number("seconds", unit)}
    labels = {**encoding, "text": {"field": "percent", "type": "nominal"}}
    return Figure(
        title="Where the step goes",
        text=f"{why.reasons[0]}.",
        layers=(
            marks("bar", rows, encoding, color="var(--c1)"),
            marks("text", rows, labels, align="left", dx=4),
        ),
        height={"step": 26},
        head=("term", "time", "share", "from"),
        rows=tuple((term, seconds_text(s), f"{percent}%", of) for term, s, percent, of in terms),
    )


def _drawn_ranks(ranks: int, most: int) -> Sequence[int]:
    """Return all ranks, or `most` of them: the first, the last, and others evenly between."""
    if ranks <= most:
        return range(ranks)
    return sorted({round(one * (ranks - 1) / (most - 1)) for one in range(most)})


def _schedule(plan: StoredPlan, timeline: Timeline) -> Figure:
    factor, unit = unit_of(timeline.pipeline_seconds)
    count = plan.arrangement.pipeline
    most = min(_MOST_RANKS, max(2, _MOST_ACTIONS * count // len(timeline.actions)))
    ranks = _drawn_ranks(count, most)
    rows = [
        {
            "rank": one.rank,
            "from": one.start_seconds * factor,
            "to": one.end_seconds * factor,
            "kind": ACTION_WORDS[one.kind],
            "words": f"rank {one.rank}, stage {one.stage}, microbatch {one.microbatch}: "
            f"{ACTION_WORDS[one.kind]}, from {seconds_text(one.start_seconds)} "
            f"to {seconds_text(one.end_seconds)}",
        }
        for one in timeline.actions
        if one.rank in ranks
    ]
    kinds = {one.kind for one in timeline.actions}
    encoding = {
        "y": name("rank", "pipeline rank"),
        "x": number("from", unit),
        "x2": {"field": "to"},
        "color": color("kind", [words for kind, words in ACTION_WORDS.items() if kind in kinds]),
    }
    width = 0.5 if len(rows) < _MOST_FRAMED else 0.0
    busy = [
        sum(one.end_seconds - one.start_seconds for one in timeline.actions if one.rank == rank)
        for rank in range(count)
    ]
    drawn = (
        "all microbatches"
        if timeline.is_whole
        else f"{timeline.microbatches} of the {plan.arrangement.microbatches} microbatches, "
        "the others repeat these"
    )
    return Figure(
        title="Schedule",
        text=f"{plan.arrangement.schedule}, {drawn}. Gaps are waits. After the pipeline, "
        f"{seconds_text(timeline.rest_seconds)} go to the last reductions and the optimizer.",
        layers=(marks("bar", rows, encoding, stroke="var(--page)", strokeWidth=width),),
        height={"step": 24},
        head=("rank", "busy", "waits"),
        rows=tuple(
            (str(rank), seconds_text(one), f"{1 - one / timeline.pipeline_seconds:.0%}")
            for rank, one in enumerate(busy)
        ),
    )


def _memory(plan: StoredPlan, why: Explanation) -> Figure:
    ranks: dict[int, Mapping[str, int]] = {}
    for stage, memory in zip(plan.stages, why.memory, strict=True):
        ranks.setdefault(stage.rank, dict(memory.categories))
    drawn = _drawn_ranks(len(ranks), _MOST_RANKS)
    used = [
        category for category, _ in MEMORY_CATEGORIES if any(r[category] for r in ranks.values())
    ]
    rows = [
        {
            "rank": rank,
            "category": category,
            "order": order,
            "size": ranks[rank][category] / _GIB,
            "words": f"rank {rank}: {category} {bytes_text(ranks[rank][category])}",
        }
        for rank in drawn
        for order, category in enumerate(used)
    ]
    limit = min(plan.limit_bytes(rank) for rank in ranks)
    encoding = {
        "y": name("rank", "pipeline rank"),
        "x": number("size", "GiB", stack="zero"),
        "color": color("category", used),
        "order": {"field": "order", "type": "quantitative"},
    }
    return Figure(
        title="Memory of a device",
        text=f"The dashed line is the limit, {bytes_text(limit)}.",
        layers=(
            marks("bar", rows, encoding),
            rule(limit / _GIB, f"limit: {bytes_text(limit)}", axis="x"),
        ),
        height={"step": 26},
        head=("rank", *used, "together"),
        rows=tuple(
            (
                str(rank),
                *(bytes_text(own[one]) if own[one] else "0" for one in used),
                bytes_text(sum(own.values())),
            )
            for rank, own in sorted(ranks.items())
        ),
    )


def _memory_over_step(plan: StoredPlan, timeline: Timeline) -> Figure:
    factor, unit = unit_of(timeline.pipeline_seconds)
    drawn = _drawn_ranks(plan.arrangement.pipeline, _MOST_LINES)
    records = [one for one in memory_over_step(plan, timeline) if one.rank in drawn]
    rows = [
        {
            "rank": f"rank {one.rank}",
            "at": one.seconds * factor,
            "size": one.bytes / _GIB,
            "words": f"rank {one.rank}, {seconds_text(one.seconds)}: {bytes_text(one.bytes)}",
        }
        for one in records
    ]
    encoding = {
        "x": number("at", unit),
        "y": number("size", "GiB"),
        "color": color("rank", [f"rank {rank}" for rank in drawn]),
    }
    limit = min(plan.limit_bytes(stage.rank) for stage in plan.stages)
    return Figure(
        title="Memory over the step",
        text="Activations grow with every forward and shrink with every backward. Between the "
        "least and the predicted peak they are drawn in proportion to the microbatches in flight.",
        layers=(
            marks("line", rows, encoding, interpolate="step-after"),
            rule(limit / _GIB, f"limit: {bytes_text(limit)}"),
        ),
        height=220,
        head=("rank", "least", "most"),
        rows=tuple(_least_and_most(rank, records) for rank in drawn),
    )


def _least_and_most(rank: int, records: Sequence[MemoryRecord]) -> tuple[str, str, str]:
    sizes = [one.bytes for one in records if one.rank == rank]
    return str(rank), bytes_text(min(sizes)), bytes_text(max(sizes))


def _layers(plan: StoredPlan) -> Figure:
    rows = [
        {
            "from": stage.first + place - 0.5,
            "to": stage.first + place + 0.5,
            "rank": stage.rank,
            "mode": f"recompute {mode}",
            "words": f"layer {stage.first + place}: stage {number}, rank {stage.rank}, "
            f"recompute {mode}",
        }
        for number, stage in enumerate(plan.stages)
        for place, mode in enumerate(stage.recompute)
    ]
    modes = {mode for stage in plan.stages for mode in stage.recompute}
    encoding = {
        "x": number("from", "layer", scale={"nice": False, "zero": False}),
        "x2": {"field": "to"},
        "y": name("rank", "pipeline rank"),
        "color": color("mode", [f"recompute {mode}" for mode in Recompute if mode in modes]),
    }
    return Figure(
        title="Layers and ranks",
        text="Which pipeline rank has which layers, and whether their activations are kept for the "
        "backward or computed again.",
        layers=(marks("bar", rows, encoding, stroke="var(--page)", strokeWidth=0.5),),
        height={"step": 24},
        head=("stage", "rank", "layers", "recompute", "forward", "backward"),
        rows=tuple(
            (
                str(number),
                str(stage.rank),
                f"{stage.first} … {stage.first + stage.count - 1}",
                recompute_words([stage]),
                seconds_text(cost.forward_seconds),
                seconds_text(cost.backward_seconds),
            )
            for number, (stage, cost) in enumerate(
                zip(plan.stages, plan.prediction.stages, strict=True)
            )
        ),
    )


def _layouts(plan: StoredPlan) -> Figure:
    rows = [
        (one.name, str(one.layers), split.module or "itself", split.op, split.axis, split.gives)
        for one in plan.classes
        for split in one.splits
    ]
    ranks = plan.arrangement.tensor
    split = f"{ranks} tensor ranks divide these ops" if rows else "No op is divided"
    return Figure(
        title="Splits inside layers",
        text=f"{split}; each class of equal layers is listed once.",
        head=("class", "layers", "module", "op", "axis", "result"),
        rows=tuple(rows),
    )


def _messages(plan: StoredPlan) -> Figure:
    terms = plan.prediction.communication
    factor, unit = unit_of(max((one.seconds for one in terms), default=1.0))
    rows = [
        {
            "reason": one.reason,
            "kind": kind,
            "seconds": seconds * factor,
            "words": f"{one.reason}, {one.collective} of {one.ranks} ranks, "
            f"{bytes_text(one.payload_bytes)}: {seconds_text(seconds)} {kind}",
        }
        for one in terms
        for kind, seconds in (
            ("exposed", one.exposed_seconds),
            ("behind compute", max(0.0, one.seconds - one.exposed_seconds)),
        )
    ]
    encoding = {
        "y": name("reason"),
        "x": number("seconds", unit, stack="zero"),
        "color": color("kind", ("exposed", "behind compute")),
    }
    return Figure(
        title="Messages",
        text="What the busiest rank sends in a step, and how long it waits for that."
        if terms
        else "No rank sends anything.",
        layers=(marks("bar", rows, encoding),) if terms else (),
        height={"step": 30},
        head=("reason", "collective", "ranks", "times", "bytes", "time", "exposed"),
        rows=tuple(
            (
                one.reason,
                one.collective,
                str(one.ranks),
                f"{one.count:,}",
                bytes_text(one.payload_bytes),
                seconds_text(one.seconds),
                seconds_text(one.exposed_seconds) if one.exposed_seconds else "0",
            )
            for one in terms
        ),
    )
