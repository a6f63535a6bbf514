"""Counts where the host waits for the GPU between two log lines; scripts should wait nowhere."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import torch

from autopar.codegen.proof.script_rank import imported
from autopar.planner.costs.prediction import Recompute
from autopar.planner.plan.declared.constraints import RecomputePin
from benchmarks.on_gpu import late_group
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.cases import CASES, GPT2, Case, Written
from benchmarks.on_gpu.ranks.joining import joined_alone, joined_late
from benchmarks.on_gpu.ranks.lanes import in_lanes
from benchmarks.on_gpu.report import Row, error_text

TABLE = "Ranks: where the host waits for the GPU in 5 steps without a log line"
_WAITS = "called a synchronizing"  # in torch's warning of a wait; it also warns of this mode itself
_WATCHED = range(3, 8)  # the watched steps; step 8, the last one, logs
_OUR_FILES = str(Path(__file__).parents[3])
_AGAIN = (RecomputePin(modules="*", mode=Recompute.FULL),)
_ALONE = (
    Case(name="one process, bf16", model=GPT2, pins={"microbatch": 4}),
    Case(name="one process, layers run again", pins={"microbatch": 4, "recompute": _AGAIN}),
    Case(name="ResNet, one process", model=("resnet.py", ()), pins={"microbatch": 4}),
)


def sync_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each place, or one that says that there is none."""
    if not context.is_gpu:
        yield Row(table=TABLE, cells={"script": "all", "place": "no GPU here"})
        return
    for case, found in in_lanes(context, (*_ALONE, *CASES), partial(_places, context)):
        places = {error_text(found): None} if isinstance(found, Exception) else found or {"none": 0}
        for place, count in places.items():
            yield Row(table=TABLE, cells={"script": case.name, "times": count, "place": place})


def _places(context: Context, one: Written, folder: str) -> Mapping[str, int]:
    store = f"{folder}/{uuid4().hex}" if one.ranks > 1 else None
    return context.on_ranks(_waits, one.ranks, one.script, store)[0]


def _waits(path: str, store: str | None) -> Mapping[str, int]:
    """Run a script, and return how often it waits at each place."""
    script: Any = imported(Path(path))
    own_step, found, step = script.train_step, Counter[str](), [0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        step[0] += 1
        torch.cuda.set_sync_debug_mode("warn" if step[0] in _WATCHED else "default")
        return own_step(*args, **kwargs)

    def note(message: Any, *_: Any, **__: Any) -> None:
        place = _place() if _WAITS in str(message) else None
        if place is not None:
            found[place] += 1

    script.train_step = watched
    arguments = ["--steps", str(_WATCHED.stop), "--log-every", "100", "--data", "synthetic"]
    joined = joined_late("cuda", store) if store else joined_alone("cuda")
    with joined, warnings.catch_warnings(), patch.object(warnings, "showwarning", note):
        warnings.simplefilter("always")
        try:
            script.main(arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _place() -> str | None:
    """Return our two innermost lines: caller → place; None for a wait in the late group."""
    stack = traceback.extract_stack()
    if any(one.filename == late_group.__file__ for one in stack):
        return None
    own = [
        one
        for one in stack
        if one.filename != __file__
        and (one.filename.startswith(_OUR_FILES) or one.filename.endswith("train.py"))
        and "site-packages" not in one.filename
    ]
    lines = [f"{Path(one.filename).name}:{one.lineno} {one.line}" for one in own[-2:]]
    return " → ".join(lines)
