"""Turns a plan into that of the same training on another number of devices, with its script."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autopar.codegen.emit import FILE_NAME as SCRIPT_NAME
from autopar.codegen.script.checksum import is_of_another_plan, is_unchanged
from autopar.codegen.subject import check_unchanged, model_spec
from autopar.console import tell_note
from autopar.planner.destination import write_whole
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.given import read_given
from autopar.planner.model.model_file import model_path
from autopar.planner.plan.files.document import FILE_NAME, read_plan, write_plan
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.resized import machines_left, resized_constraints

_LONGEST_SECONDS = 1800  # that another machine plans
_POLL_SECONDS = 1.0


class OtherPlanError(AutoparError):
    """A plan that lies beside the script of another one."""

    exit_code = ExitCode.MISMATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A plan to train by, and where it lies with its script."""

    plan: Plan
    file: Path
    script: Path
    text: str | None = None  # of a script that is not written yet, nor is its plan

    @classmethod
    def read(cls, path: Path) -> Trained:
        """Return the plan in a file, or in plan.json of a folder, with the script beside it."""
        file = path / FILE_NAME if path.is_dir() else path
        return cls(plan=read_plan(file), file=file, script=file.parent / SCRIPT_NAME)

    @property
    def source(self) -> str:
        """The text of the script."""
        return read_given(self.script, what="the script") if self.text is None else self.text

    def refuse_another_plan(self) -> None:
        """Refuse a plan that its script was not written by: it would not be what is trained."""
        if is_of_another_plan(self.source, self.plan):
            raise OtherPlanError(
                "the script was written by another plan than this one, which was changed since",
                where=f"{self.script} and {self.file}",
                fix=f"write it anew: autopar emit {self.file}; or bring the plan back",
            )

    def write(self) -> None:
        """Write what was made just now; other machines wait for the plan, so that comes last."""
        if self.text is not None:
            write_whole(self.script, self.text, what="the script")
            write_plan(self.plan, self.file)


def made_ahead(trained: Trained, devices: int) -> Trained | None:
    """Return the plan of the same training for so many devices that was made ahead, if any was.

    Its folder is named as the plan's with their number behind: `out-4` beside `out`.
    """
    folder = _ahead(trained, devices)
    found = _written_in(folder)
    if found is not None and (unlike := _unlike(trained, devices, found)):
        tell_note(f"the plan in {folder} is not taken: it has another {', another '.join(unlike)}")
        return None
    return found


def left_in(folder: Path, trained: Trained, devices: int, machines: int) -> Trained | None:
    """Return the plan for such machines that an earlier start of the run has left there."""
    found = _written_in(folder)
    if found is None or _unlike(trained, devices, found):
        return None
    return found if len(found.plan.cluster.nodes) == machines else None


def awaited(trained: Trained, devices: int, folder: Path, machines: int) -> Trained:
    """Return what the first machine plans for so many devices, once it is in the run's folder."""
    tell_note(f"waiting for the plan for {devices} devices that the first machine makes")
    until = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < until:
        if (found := left_in(folder, trained, devices, machines)) is not None:
            return found
        time.sleep(_POLL_SECONDS)
    raise InputError(
        f"the first machine has left no plan for {devices} devices within {_LONGEST_SECONDS} s",
        where=str(folder / FILE_NAME),
        expected="a folder that all machines see, and this command on the first one, too",
        fix="plan ahead: autopar plan … --gpus N --nodes M -o FOLDER; then autopar run FOLDER",
    )


def _written_in(folder: Path) -> Trained | None:
    is_there = (folder / FILE_NAME).is_file() and (folder / SCRIPT_NAME).is_file()
    return Trained.read(folder) if is_there else None


def _unlike(trained: Trained, devices: int, found: Trained) -> list[str]:
    """Return what sets a plan apart from one of the same training for so many devices."""
    facts, needed = _facts(found.plan), {**_facts(trained.plan), "number of devices": devices}
    return [word for word, fact in needed.items() if facts[word] != fact]


def _ahead(trained: Trained, devices: int) -> Path:
    folder = trained.file.parent.resolve()
    return folder.parent / f"{folder.name}-{devices}"


def _facts(plan: Plan) -> dict[str, object]:
    """Return what sets trainings apart, by the words for it."""
    return {
        "model": (plan.model.source_hash, plan.model.arguments),
        "global batch": plan.arrangement.global_batch,
        "precision": plan.arrangement.precision,
        "number of devices": plan.arrangement.ranks,
    }


def planned_again(trained: Trained, devices: int, folder: Path, machines: int = 1) -> Trained:
    """Return the best plan of the same training on machines with so many devices together.

    It and its script are to be written into `folder`.
    """
    from autopar.planning import Request, make_plans, scripted  # here alone: it takes seconds

    plan, beside = trained.plan, trained.file.parent
    if not is_unchanged(trained.source):
        raise InputError(
            f"the script was changed by hand, and one for {devices} devices would not be",
            where=str(trained.script),
            fix=f"plan into {_ahead(trained, devices)} (autopar plan … --gpus {devices} -o) and "
            "change the script there: it is taken then",
        )
    spec = model_spec(plan, beside)
    check_unchanged(plan, model_path(spec))
    resized = resized_constraints(plan, devices)
    if resized.dropped:
        told = ", ".join(map(str, resized.dropped))
        tell_note(f"not demanded of a plan for --gpus {devices}: {told}")
    request = Request(
        model=spec,
        arguments=tuple(f"{name}={value}" for name, value in plan.model.arguments),
        clusters=(machines_left(plan, devices, machines),),
        constraints=resized.constraints,
    )
    these_alone = partial(make_plans, looks_at_fewer=False)
    made, text = scripted(request, folder / SCRIPT_NAME, plans=these_alone)
    # Runs of one model are found by its name as it was given.
    found = replace(made.plan, model=replace(made.plan.model, spec=plan.model.spec))
    return Trained(plan=found, file=folder / FILE_NAME, script=folder / SCRIPT_NAME, text=text)
