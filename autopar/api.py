"""autopar from Python: plan a training, then write, explain and verify its script.

import autopar

plan = autopar.plan("model.py", gpus=8, global_batch=64)
plan.write("out")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Unpack

from autopar.codegen.script.render import FILE_NAME as SCRIPT_NAME
from autopar.codegen.script.render import refuse_overwriting
from autopar.options import request_of
from autopar.planner.costs.prediction import Arrangement, Prediction
from autopar.planner.errors import AutoparError, InputError
from autopar.planner.files import (
    PLAN_FOLDER,
    refuse_named_as_file,
    refuse_replacing,
    write_whole,
)
from autopar.planner.model.model_file import model_path
from autopar.planner.plan.declared.settings import DemandOptions
from autopar.planner.plan.files.document import FILE_NAME, read_plan, refuse_foreign, write_plan
from autopar.planner.plan.fleet import Curve
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.telling.explanation import Explanation, explain
from autopar.planner.plan.telling.words import arrangement_words
from autopar.planner.plan.traced import with_model
from autopar.planning import make_plans, script_of, traced_plan

if TYPE_CHECKING:
    from autopar.codegen.proof.comparison import TrainingComparison

__all__ = ["AutoparError", "Plan", "load", "plan"]

Value = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan of how to split a training, with methods to write, explain and verify its script."""

    content: StoredPlan  # the contents of plan.json
    folder: Path  # a relative path of the model file starts here
    curve: Curve | None = None  # one plan per number of devices, if several were compared
    uses_cache: bool = True

    def __str__(self) -> str:
        """Return the plan and its predicted step in one line."""
        content = self.content
        return (
            f"{content.model.name} on {content.machines.devices} × {content.machines.device}: "
            f"{arrangement_words(self.arrangement)}, {self.step_seconds:.4g} s a step"
        )

    @property
    def arrangement(self) -> Arrangement:
        """The degrees of each kind of parallelism, the microbatches and the schedule."""
        return self.content.arrangement

    @property
    def prediction(self) -> Prediction:
        """The step's seconds term by term, and each stage's compute and memory."""
        return self.content.prediction

    @property
    def step_seconds(self) -> float:
        """The predicted time of a step."""
        return self.prediction.step_seconds

    @property
    def gap(self) -> float:
        """The largest share of the step that another plan could save; 0.0 if none is faster."""
        return self.content.proof.gap

    def write(self, folder: str | Path = ".", *, force: bool = False) -> Path:
        """Write plan.json and train.py into a folder, and return the script's path.

        A script that was changed by hand is overwritten only with `force`.
        """
        place = _path(folder)
        refuse_named_as_file(place, option="write", expected=PLAN_FOLDER)
        refuse_foreign(place / FILE_NAME)
        text = self._script(place / SCRIPT_NAME, force=force)
        write_plan(self.content, place / FILE_NAME)
        write_whole(place / SCRIPT_NAME, text, what="the script")
        return place / SCRIPT_NAME

    def emit(self, path: str | Path = SCRIPT_NAME, *, force: bool = False) -> Path:
        """Write the training script alone, and return its path."""
        place = _path(path)
        write_whole(place, self._script(place, force=force), what="the script")
        return place

    def _script(self, place: Path, *, force: bool) -> str:
        """Return the script for a path; raise if a file there must not be replaced."""
        refuse_replacing(place, model_path(self.content.model.spec))
        if not force:
            refuse_overwriting(place)
        made = script_of(self.content, place, folder=self.folder, uses_cache=self.uses_cache)
        return made.text

    def explain(self) -> Explanation:
        """Return the reasons for the plan: time, stages, memory, communication, splits."""
        return explain(self.content)

    def report(self, path: str | Path = "report.html", *, run: str | Path | None = None) -> Path:
        """Draw the plan, and a run of it, as one HTML file; return its path."""
        from autopar.pages.report import write_report  # needs jinja2

        place = _path(path)
        write_report(self.content, place, None if run is None else _path(run))
        return place

    def _repr_html_(self) -> str | None:
        """Return the report in a frame, for notebooks; None if charts cannot be drawn."""
        from autopar.pages.report import report  # needs jinja2

        try:
            page = report(self.content)
        except InputError:
            return None  # the notebook shows the text
        style = "width: 100%; height: 50rem; border: 0"
        return f'<iframe srcdoc="{escape(page)}" style="{style}"></iframe>'

    def verify(
        self, script: str | Path | None = None, *, steps: int = 5, half_steps: int = 30
    ) -> TrainingComparison:
        """Train with a script on CPU processes, and with plain PyTorch in one; compare both.

        Without `script`, the plan's own script is used. The result's `is_within(1e-9)` says whether
        both train alike: equal in float64, and in the plan's 16-bit dtype about as close to fp32 as
        plain PyTorch.
        """
        from autopar.codegen.proof.verification import read_script_of, verify  # needs torch

        with TemporaryDirectory(prefix="autopar-verified-") as name:
            content = traced_plan(self.content, self.folder, uses_cache=self.uses_cache)
            traced = replace(self, content=content)
            path = traced.emit(Path(name) / SCRIPT_NAME) if script is None else _path(script)
            given = read_script_of(content, path, self.folder)
            return verify(content, self.folder, given, steps=steps, half_steps=half_steps)


def plan(
    model: str | Path,
    *,
    gpus: int | str | Sequence[int] | None = None,
    device: str | None = None,
    nodes: int | None = None,
    cluster: str | Path | None = None,
    arguments: Mapping[str, object] | None = None,
    pins: Mapping[str, Value] | None = None,
    constraints: str | Path | None = None,
    profile: str | Path | None = None,
    time_limit_seconds: float | None = None,
    cache: bool = True,
    **demands: Unpack[DemandOptions],
) -> Plan:
    """Plan how to split the training of a model, and prove the choice.

    `model` is path.py or path.py:factory, and `arguments` are for its functions. The machines are
    `gpus` (8, or several to choose from: [1, 2, 4, 8]) of a `device`, or a `cluster` file. `pins`
    are those of --pin: {"tp": 2}. `demands` are named as the options of `autopar plan`, with `_`
    for `-`: `global_batch=64, max_tp=8`.
    """
    counts = gpus if gpus is None or isinstance(gpus, int | str) else ",".join(map(str, gpus))
    request = request_of(
        str(model),
        arguments=_pairs(arguments),
        gpus=_text(counts),
        device=device,
        nodes=_text(nodes),
        cluster=None if cluster is None else _path(cluster),
        pins=_pairs(pins),
        demands=demands,
        constraints=None if constraints is None else _path(constraints),
        time_limit_seconds=time_limit_seconds,
        profile=None if profile is None else _path(profile),
        uses_cache=cache,
    )
    found = make_plans(request)
    is_compared = len(found.curve.trials) > 1
    curve = found.curve if is_compared else None
    return Plan(content=found.plan, folder=Path(), curve=curve, uses_cache=cache)


def load(path: str | Path, *, model: str | Path | None = None) -> Plan:
    """Return the plan in a plan.json or its folder; `model` is the model file, if it has moved."""
    place = _path(path)
    folder = place if place.is_dir() else place.parent
    content = with_model(read_plan(place), folder, None if model is None else str(model))
    return Plan(content=content, folder=folder)


def _path(text: str | Path) -> Path:
    """Return a path. Raises for an empty string, which would mean the current folder."""
    if not str(text).strip():
        raise InputError("a path is empty")
    return Path(text)


def _pairs(values: Mapping[str, object] | None) -> list[str]:
    return [f"{name}={value}" for name, value in (values or {}).items()]


def _text(value: object) -> str | None:
    return None if value is None else str(value)
