"""Plans an idiom as `autopar plan` does, and trains it by its script on a pool of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

from safetensors.torch import load_file

from autopar.codegen.proof.script_rank import imported
from autopar.planner.costs.prediction import Zero
from autopar.planner.errors import AutoparError
from autopar.planner.plan.telling.words import meaning_notes
from autopar.planning import Request, scripted
from tests.codegen.idioms.base import BASE
from tests.codegen.idioms.loop import CLIP, GLOBAL_BATCH, STEPS, Trained, train
from tests.codegen.idioms.outcomes import Idiom
from tests.field.cells import Kind, Subject
from tests.field.trial import cluster_of, constraints_of
from tests.runtime.processes import run_on_ranks

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "dp": Kind(ranks=2, data=2, zero=Zero.NONE, microbatch=2),
        "ZeRO-3": Kind(ranks=2, data=2, zero=Zero.PARAMETERS, microbatch=2),
        "tp": Kind(ranks=2, tensor=2, microbatch=4),
        "pp": Kind(ranks=2, pipeline=2, microbatch=2),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An idiom that is not trained, and why."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ByScript:
    """What a script trained, and what was told of it."""

    trained: Trained
    notes: str


def written(one: Idiom, folder: Path) -> Path:
    """Write the model file of an idiom into a folder that stays, and return its place."""
    text = BASE + one.text
    path = folder / f"idiom_{crc32(text.encode())}.py"  # processes of tests keep what they import
    path.write_text(text, encoding="utf-8")
    return path


@cache
def plain(path: Path, options: tuple[str, ...]) -> Trained:
    """Train an idiom by the loop of one device; --clip is the one option that it heeds."""
    given = dict(zip(options[::2], options[1::2], strict=False))
    return train(path, clip=float(given.get("--clip", CLIP)))


def by_script(one: Idiom, path: Path, way: str, folder: Path) -> ByScript | Refusal:
    """Plan the model file of an idiom in one way, and train by its script."""
    kind = replace(KINDS[way], microbatch=None) if one.is_whole else KINDS[way]
    subject = Subject(path=path, global_batch=GLOBAL_BATCH)
    request = Request(
        model=str(path),
        arguments=(),
        clusters=(cluster_of(kind),),
        constraints=constraints_of(subject, kind),
        looks_at_fewer=False,
    )
    try:
        with redirect_stderr(StringIO()) as said:
            made, text = scripted(request, folder / "train.py")
    except AutoparError as refusal:
        return Refusal(message=f"{refusal.found} {refusal.expected} {refusal.fix}")
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    given = ["--steps", str(STEPS), "--log-every", "1", "--dtype", "float32", *one.options]
    given += ["--export", str(folder / "model.safetensors")]
    given += ["--metrics", str(folder / "metrics.jsonl")]
    for left in (folder / "metrics.jsonl", folder / "model.safetensors"):
        left.unlink(missing_ok=True)
    told = run_on_ranks(_run, kind.ranks, str(script), given, timeout_seconds=120.0)[0]
    notes = " ".join((said.getvalue() + " ".join(meaning_notes(made.plan)) + told.said).split())
    if told.code:
        return Refusal(message=notes)
    return ByScript(trained=_trained(folder, told.losses), notes=notes)


@dataclass(frozen=True, slots=True)
class _Ran:
    losses: Sequence[float]
    said: str
    code: int


def _run(path: str, arguments: Sequence[str]) -> _Ran:
    """Run a script on this rank, evaluations and the check of its first step included."""
    script: Any = imported(Path(path))
    evaluates = ["--eval-every", str(STEPS)] if hasattr(script, "new_eval_dataset") else []
    with redirect_stderr(StringIO()) as said, redirect_stdout(StringIO()):
        try:
            losses = script.main([*arguments, *evaluates, "--check-first-step"])[1]
            return _Ran(losses, said.getvalue(), 0)
        except SystemExit as left:
            return _Ran((), said.getvalue(), int(str(left.code)))


def _trained(folder: Path, losses: Sequence[float]) -> Trained:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    found = [one for one in lines if one.get("event") == "evaluated"]
    evaluated = {"loss": found[-1]["loss"], **found[-1]["metrics"]} if found else {}
    weights = load_file(folder / "model.safetensors")
    return Trained(losses=tuple(losses), evaluated=evaluated, weights=weights)
