"""Reads the metrics of a run, and analyses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.planner.costs.schedules.orders import ActionKind
from autopar.planner.errors import InputError
from autopar.planner.files import Bytes, FigureNumber, Seconds, SomeSeconds, damaged
from autopar.planner.plan.files.document import FILE_NAME as PLAN_NAME
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.telling.timeline import (
    backward_of,
    computing_seconds,
    numbers_of_stages,
    stages_of_rank,
)
from autopar.runs.run_record import METRICS, read_record
from autopar.runtime.ranks.metrics import Event, parsed
from autopar.runtime.ranks.options import MOST_STEPS

_END_BYTES = 2**20  # how much of a file's end is read for the last step
_MOST_BYTES = 2**30
Step = Annotated[int, Ge(0), Le(MOST_STEPS)]
Rank = Annotated[int, Ge(0), Le(2**31)]
Reading = float | str | None  # nan and inf are strings


class _Record(BaseModel):
    """The fields that every kind of line has. Later versions may add others."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, str_max_length=100_000
    )

    time: Annotated[float, Ge(0)] | None = None


class StepRecord(_Record):
    """The figures of a step line."""

    step: Step
    loss: Reading = None
    gradient_norm: Reading = None
    learning_rate: Reading = None
    seconds: SomeSeconds | None = None
    per_second: Reading = None
    unit: str = "rows"
    memory_bytes: Bytes | None = None
    mfu: FigureNumber | None = None
    against_plan: FigureNumber | None = None
    seconds_left: Reading = None
    compile_seconds: Reading = None


class _PartRecord(_Record):
    """The median times of a stage's forwards and backwards in the profiled step."""

    forward_seconds: Seconds | None
    backward_seconds: Seconds | None


class _RankRecord(_Record):
    """The times and memory of a rank in the profiled step."""

    pipeline_rank: Rank
    compute_seconds: Seconds
    step_seconds: Seconds
    memory_bytes: Bytes | None = None
    parts: list[_PartRecord] = []


class EventRecord(_Record):
    """An event, such as the start."""

    event: str
    step: Step | None = None
    why: str | None = None


class _KeptRecord(EventRecord):  # a checkpoint was written
    seconds: Seconds
    waited_seconds: Seconds | None = None


class _ProfiledRecord(EventRecord):  # a step was profiled
    step: Step
    ranks: list[_RankRecord]


_KINDS: dict[str, type[EventRecord]] = {
    Event.KEPT: _KeptRecord,
    Event.PROFILED: _ProfiledRecord,
}


def _read_lines(path: Path, start: int = 0) -> tuple[Sequence[dict[str, Any]], Sequence[str]]:
    """Return the valid lines of a file from an offset, and the faults of the others.

    Lines that are not JSON (cut off by a kill) are ignored.
    """
    found, faults = list[dict[str, Any]](), list[str]()
    for number, line in enumerate(_content(path, start).splitlines(), start=1):
        try:
            one = parsed(line)
        except ValueError:
            continue
        fault = _fault(one)
        if fault:
            faults.append(f"line {number}: {fault}")
        else:
            found.append(one)
    return found, faults


def lines_of(path: Path, *, start: int = 0) -> Sequence[dict[str, Any]]:
    """Return the valid lines of a file from an offset."""
    return _read_lines(path, start)[0]


def sound_lines_of(path: Path) -> Sequence[dict[str, Any]]:
    """Return the lines of a file; raises if any is invalid."""
    lines, faults = _read_lines(path)
    if faults:
        fix = "remove these lines, or bring back a copy"
        raise damaged(faults, what="the metrics were", where=str(path), fix=fix)
    return lines


def _content(path: Path, start: int) -> bytes:
    if not _is_there(path):
        return b""
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path} has more than {_MOST_BYTES} bytes of metrics")
    return content


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a damaged record may have a name that is too long
        return False


def _fault(line: object) -> str:
    """Return the fault of a line, or ""."""
    if not isinstance(line, dict):
        return "not a JSON object"
    kind: type[_Record] = StepRecord
    if "event" in line:
        kind = _KINDS.get(str(line["event"]), EventRecord)
    elif "step" not in line:
        return "neither a step nor an event"
    try:
        kind.model_validate(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""


def last_lines(path: Path) -> Sequence[dict[str, Any]]:
    """Return the lines at the end of a file."""
    size = path.stat().st_size if _is_there(path) else 0
    return lines_of(path, start=max(0, size - _END_BYTES))


def last_step(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the last step."""
    return next((one for one in reversed(lines) if "event" not in one), None)


def last_event(lines: Sequence[dict[str, Any]]) -> str | None:
    """Return the last event, if no step came after it."""
    return lines[-1].get("event") if lines else None


def has_finished(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the training has finished since its last start."""
    return any(one == Event.FINISHED for one in _events_of_last_start(lines))


def _events_of_last_start(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for one in reversed(lines):
        if one.get("event") == Event.STARTED:
            return
        if "event" in one:
            yield one["event"]


FAR = 0.25  # relative to the prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigure:
    """A predicted and a measured figure; `unit` is one that `plan_page.figure_text` knows."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The measured figure's excess over the prediction, as a share of the prediction."""
        if not self.predicted:
            return 0.0 if not self.measured else float("inf")
        return self.measured / self.predicted - 1

    @property
    def is_far_off(self) -> bool:
        """Whether the measured figure differs from the prediction by more than a quarter."""
        return abs(self.error) > FAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A run compared with its plan, mostly by medians over the step lines after the warm-up."""

    compared_steps: int  # step lines after the warm-up
    fastest_seconds: float
    slowest_seconds: float
    is_on_planned_device: bool
    figures: tuple[RunFigure, ...]
    profiled_step: int | None  # the step of --profile-step
    ranks: tuple[RunFigure, ...]  # per pipeline rank: medians of times, the largest memory
    keeping_seconds: float | None  # how long the training waits for a checkpoint: the median


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedRun:
    """The lines of a run, and its comparison with its plan."""

    lines: Sequence[Mapping[str, Any]]
    analysis: Analysis


def metrics_of(run: Path) -> Path:
    """Return the path of a run's metrics; `run` is a run's or job's folder, or the file itself."""
    record = read_record(run)
    if record is not None:
        return record.metrics_in(run)
    return run / METRICS if run.is_dir() else run


def analyze_run(plan: StoredPlan, run: Path) -> AnalyzedRun:
    """Compare a plan with a run, given by its folder or its metrics file."""
    copy = run / PLAN_NAME
    if copy.is_file() and read_plan(copy) != plan:
        raise InputError(f"the run {run} used another plan", fix=f"compare it with {copy}")
    path = metrics_of(run)
    if not path.is_file():
        raise InputError(
            f"{run} is no run, and no file of metrics",
            expected="a folder that `autopar run` made, or what a script wrote with --metrics",
        )
    lines = sound_lines_of(path)
    analysis = analyze(plan, lines)
    if analysis is None:
        raise InputError(f"{path} has no step", expected="a run with at least one step line")
    return AnalyzedRun(lines=lines, analysis=analysis)


def analyze(plan: StoredPlan, lines: Sequence[dict[str, Any]]) -> Analysis | None:
    """Compare a plan with the lines of a run, or return None if they have no step."""
    steps = steady_steps(lines)
    if not steps:
        return None
    seconds = [float(one["seconds"]) for one in steps]
    kept = [
        float(one["seconds"] if one.get("waited_seconds") is None else one["waited_seconds"])
        for one in lines
        if one.get("event") == Event.KEPT
    ]
    profiled = next((o for o in reversed(lines) if o.get("event") == Event.PROFILED), None)
    return Analysis(
        compared_steps=len(steps),
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        is_on_planned_device=any(one.get("against_plan") is not None for one in steps),
        figures=tuple(_figures(plan, steps)),
        profiled_step=None if profiled is None else int(profiled["step"]),
        ranks=() if profiled is None else tuple(_rank_figures(plan, profiled["ranks"])),
        keeping_seconds=median(kept) if kept else None,
    )


def steady_steps(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the step lines without the first after each start, or these if there are no others."""
    steady: list[dict[str, Any]] = []
    warming: list[dict[str, Any]] = []
    is_first = True
    for one in lines:
        if "event" in one:
            is_first = is_first or one["event"] == Event.STARTED
        elif one.get("seconds") is not None:
            (warming if is_first else steady).append(one)
            is_first = False
    return steady or warming


def _figures(plan: StoredPlan, steps: Sequence[dict[str, Any]]) -> Iterator[RunFigure]:
    predicted = plan.prediction
    seconds = median(float(one["seconds"]) for one in steps)
    yield RunFigure(name="step", unit="s", predicted=predicted.step_seconds, measured=seconds)
    amount = plan.arrangement.global_batch * plan.model.tokens_per_row
    yield RunFigure(
        name=f"{steps[-1].get('unit', 'rows')} a second",
        unit="1/s",
        predicted=amount / predicted.step_seconds,
        measured=amount / seconds,
    )
    shares = [float(one["mfu"]) for one in steps if one.get("mfu") is not None]
    if shares:
        yield RunFigure(name="MFU", unit="share", predicted=predicted.mfu, measured=median(shares))
    held = [float(one["memory_bytes"]) for one in steps if one.get("memory_bytes") is not None]
    if held:
        yield RunFigure(
            name="memory of the first rank",
            unit="B",
            predicted=_reserved_bytes(plan, 0),
            measured=max(held),
        )


def _reserved_bytes(plan: StoredPlan, rank: int) -> float:
    """Return the predicted memory of a pipeline rank, as the allocator counts it."""
    return stages_of_rank(plan, rank)[0].memory.reserved_bytes


def _rank_figures(plan: StoredPlan, ranks: Sequence[dict[str, Any]]) -> Iterator[RunFigure]:
    """Yield each pipeline rank's times and memory in the profiled step."""
    step = plan.prediction.step_seconds
    for rank in range(plan.arrangement.pipeline):
        own = [one for one in ranks if one["pipeline_rank"] == rank]
        if not own:  # the run had fewer pipeline ranks
            continue
        seconds = computing_seconds(plan, rank)
        measured, whole = (
            median(float(one[name]) for one in own) for name in ("compute_seconds", "step_seconds")
        )
        name = f"pipeline rank {rank}" if plan.arrangement.pipeline > 1 else "a rank"
        yield RunFigure(name=f"{name}: computing", unit="s", predicted=seconds, measured=measured)
        yield RunFigure(
            name=f"{name}: messages and waiting",
            unit="s",
            predicted=max(0.0, step - seconds),
            measured=whole - measured,
        )
        yield from _stage_figures(plan, rank, own)
        held = [float(one["memory_bytes"]) for one in own if one.get("memory_bytes") is not None]
        if held:
            reserved = _reserved_bytes(plan, rank)
            yield RunFigure(
                name=f"{name}: memory", unit="B", predicted=reserved, measured=max(held)
            )


def _stage_figures(
    plan: StoredPlan, rank: int, ranks: Sequence[dict[str, Any]]
) -> Iterator[RunFigure]:
    """Yield the times of a microbatch's forward and backward in each stage of a pipeline rank."""
    kinds = list(ActionKind)
    actions = {"forward": 0, "backward": kinds.index(backward_of(plan))}
    for place, number in enumerate(numbers_of_stages(plan, rank)):
        predicted = plan.prediction.stages[number].action_seconds
        for name, action in actions.items():
            parts = [one["parts"][place] for one in ranks if place < len(one.get("parts", ()))]
            found = [one[f"{name}_seconds"] for one in parts]
            measured = [float(seconds) for seconds in found if seconds is not None]
            if predicted is not None and measured:
                stage = f"stage {number}" if len(plan.stages) > 1 else "a microbatch"
                yield RunFigure(
                    name=f"{stage}: {name}",
                    unit="s",
                    predicted=predicted[action],
                    measured=median(measured),
                )
