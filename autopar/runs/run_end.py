"""Turns a torchrun command into how the run has ended, and why, which its record gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.planner.errors import ExitCode
from autopar.runs.launching import Ended, launch
from autopar.runs.run_folder import LOGS, Nodes
from autopar.runs.run_metrics import has_finished, last_event, last_step, lines_of
from autopar.runs.run_record import EXIT_CODES, RECORD, RunRecord, RunState, write_record
from autopar.runs.verdicts import Ranks
from autopar.runtime.ranks.metrics import Event

_UNFINISHED = "the script ended without an error, but did not train to its end"
_UNFINISHED_FIX = "a model file or a dataset that ends the process (sys.exit) does so"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run has ended; `last` says after which step."""

    state: RunState
    code: ExitCode
    last: str
    why: str | None = None
    fix: str = ""
    leftovers: int = 0  # processes that outlived torchrun


def recorded(folder: Path, record: RunRecord, nodes: Nodes, train: Callable[[], End]) -> End:
    """Train with the record of the run in its folder, which gets its end, whatever that is."""
    name = f"node-{nodes.rank}.json" if nodes.rank else RECORD
    write_record(folder, record, name=name)
    state, why = RunState.INTERRUPTED, None  # by a signal before torchrun is there
    try:
        end = train()
        state, why = end.state, end.why
    except Exception as error:
        state, why = RunState.FAILED, str(error)
        raise
    finally:
        ended = replace(record, state=state, why=why, ended_at=time.time())
        write_record(folder, ended, name=name)
    return end


def trained(command: Sequence[str], folder: Path, metrics: Path, nodes: Nodes) -> End:
    """Run torchrun in the folder of a run, and tell how it has ended."""
    seen, since = (metrics.stat().st_size if metrics.is_file() else 0), time.time()
    ended = launch(command)
    for log in (folder / LOGS).rglob("*.log"):
        log.chmod(0o600)
    lines = lines_of(metrics, start=seen)
    is_told_here = nodes.rank == 0 or metrics.is_file()  # the first rank may be elsewhere
    state = ended_as(ended, lines) if is_told_here else _as_returned(ended)
    step = last_step(lines)
    end = End(
        state=state,
        code=EXIT_CODES[state],
        last=f"after step {step['step']:,}" if step else "before its first line",
        leftovers=ended.leftovers,
    )
    return _with_reason(end, ended, lines, folder, since) if state is RunState.FAILED else end


def ended_as(ended: Ended, lines: Sequence[dict[str, Any]]) -> RunState:
    """Tell how a run has ended by the lines since its start: torchrun tells only that it has."""
    if ended.code == 0:
        return RunState.FINISHED if has_finished(lines) else RunState.FAILED
    if last_event(lines) == Event.PREEMPTED:
        return RunState.PREEMPTED
    return RunState.INTERRUPTED if ended.is_signalled else RunState.FAILED


def _as_returned(ended: Ended) -> RunState:
    if ended.code == 0:
        return RunState.FINISHED
    return RunState.INTERRUPTED if ended.is_signalled else RunState.FAILED


def _with_reason(
    end: End, ended: Ended, lines: Sequence[dict[str, Any]], folder: Path, since: float
) -> End:
    """Return the end of a run that failed with what its ranks have said, or raised."""
    ranks = Ranks.of(folder / LOGS, since=since)
    verdict = ranks.verdict()
    if verdict is not None and verdict.exit_code is not ExitCode.TRAINING_FAILED:
        return replace(end, code=verdict.exit_code, why=verdict.found, fix=verdict.fix)
    if ended.code == 0:
        return replace(end, why=_UNFINISHED, fix=_UNFINISHED_FIX)
    stopped = lines[-1].get("why") if last_event(lines) == Event.STOPPED else None
    why = stopped or (verdict.found if verdict is not None else ranks.raised())
    found = f"the training failed {end.last}" + (f": {why}" if why else "")
    return replace(end, why=found, fix=verdict.fix if verdict is not None else "")
