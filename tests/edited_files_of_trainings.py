"""What trainings leave and are told: manifests, records, metrics, options; what reads each."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from fractions import Fraction
from functools import partial
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from autopar.checkpoints import export_weights, kept_in, whole_checkpoint
from autopar.commands.run import runs
from autopar.pages.other_pages import list_page
from autopar.planner.plan.plan import Plan
from autopar.runs.run_metrics import analyze, sound_lines_of
from autopar.runtime.checkpointing.manifest import NAME, rank_file
from autopar.runtime.ranks.options import MOST_EPOCHS, MOST_STEPS, read_options
from tests.codegen.plans import pinned_plan
from tests.field.bad_inputs.kept import record_text, signed, write_checkpoint
from tests.random_edits import Edit, Edited, edited_json, edited_text

_LINES = (
    {"time": 1.0, "event": "started", "step": 0, "steps": 30},
    {"time": 2.0, "step": 10, "loss": 2.5, "seconds": 0.5, "unit": "rows", "memory_bytes": None},
    {"time": 3.0, "step": 20, "loss": "nan", "seconds": 0.25, "mfu": 0.5, "against_plan": 1.5},
    {"time": 3.5, "event": "kept", "step": 20, "seconds": 1.0, "waited_seconds": 0.5},
    {"time": 4.0, "event": "profiled", "step": 20, "ranks": [
        {"rank": 0, "pipeline_rank": 0, "step_seconds": 0.5, "compute_seconds": 0.25},
    ]},
    {"time": 5.0, "step": 30, "loss": 1.5, "seconds": 0.25, "seconds_left": 0.0},
)  # fmt: skip
_OPTIONS = {
    "--steps": "30", "--lr": "0.1", "--workers": "2", "--clip": "1.0", "--seed": "3",
    "--weights": "w.safetensors", "--allow-missing": "head.*", "--dtype": "float32",
    "--log-every": "5", "--metrics": "m.jsonl", "--profile-step": "7", "--tensorboard": "curves",
    "--on-nan": "stop", "--timeout": "60", "--export": "none", "--checkpoint": "kept",
    "--checkpoint-every": "10", "--checkpoint-minutes": "5", "--keep": "2", "--keep-every": "20",
    "--resume": "auto", "--eval-every": "10", "--early-stop": "3", "--data": "synthetic",
    "--last-rows": "pad", "--weight-decay": "0.1", "--warmup-steps": "10",
}  # fmt: skip
_OF_EPOCHS = {
    "--epochs": "1.5", "--betas": "0.9 0.95", "--export-best": "", "--eval-every": "5",
    "--checkpoint": "kept", "--export": "w.safetensors", "--last-rows": "drop",
}  # fmt: skip
_SETTINGS = {
    "STEPS": 1, "CLIP_NORM": 1.0, "SEED": 0, "DTYPE": "float32", "LOG_EVERY": 1, "EXPORT": "none",
    "CHECKPOINT": "none", "CHECKPOINT_EVERY": 10, "KEEP": 3, "WORKERS": 0, "EVAL_EVERY": 5,
    "CHECK_FIRST_STEP": False, "BETAS": (0.9, 0.95), "WEIGHT_DECAY": 0.1, "WARMUP_STEPS": 2000,
}  # fmt: skip
_EVERYWHERE = ("",)  # where any place may have another right value


def kinds_of_trainings() -> Iterator[Edited]:
    """Yield each kind of file that trainings leave, and the options of scripts as a file."""
    with TemporaryDirectory() as folder:
        step = write_checkpoint(Path(folder), 4)
        manifest, shard = (step / NAME).read_bytes(), (step / rank_file(0)).read_bytes()
    yield Edited(
        name=NAME,
        source=manifest,
        edit=_resigned,
        read=_exported,
        free=("moment", "origin", "exported"),
        words={"files": ("file", rank_file(0))},
        beside={rank_file(0): shard},
    )
    yield Edited(
        name="run.json",
        source=record_text().encode(),
        edit=edited_json,
        read=_listed,
        free=_EVERYWHERE,
        words={"written_by": ("there are no runs",)},  # it is another program's
    )
    metrics = "\n".join(map(json.dumps, _LINES)).encode()
    plan = pinned_plan("mnist.py", (), microbatch=4)
    yield Edited(
        name="metrics.jsonl", source=metrics, edit=_edited_line, read=partial(_analyzed, plan)
    )
    for name, options in (("options.json", _OPTIONS), ("options_of_epochs.json", _OF_EPOCHS)):
        source = json.dumps(options).encode()
        yield Edited(name=name, source=source, edit=edited_json, read=_read, free=_EVERYWHERE)


def _resigned(source: bytes, random: Random) -> Edit:
    """Edit a manifest as somebody does who knows how autopar signs it."""
    edit = edited_json(source, random)
    return replace(edit, content=signed(edit.content.decode()).encode())


def _exported(path: Path) -> bytes:
    """List a checkpoint, and return what is exported of it."""
    for _ in list_page(kept_in(path.parent), ()):
        pass
    with TemporaryDirectory() as folder:
        file = Path(folder) / "w.safetensors"
        export_weights(whole_checkpoint(path.parent), file)
        return file.read_bytes()


def _listed(path: Path) -> None:
    with redirect_stdout(StringIO()):
        runs(path.parent)


def _edited_line(source: bytes, random: Random) -> Edit:
    """Edit a value of one line, or some characters of all."""
    lines = source.splitlines()
    if random.random() < 0.3:
        return replace(edited_text(source, random), place="line")
    number = random.randrange(len(lines))
    edit = edited_json(lines[number], random)
    lines[number] = edit.content
    return replace(edit, place=f"line {number + 1}", content=b"\n".join(lines))


def _analyzed(plan: Plan, path: Path) -> None:
    analyze(plan, sound_lines_of(path))


def _read(path: Path) -> None:
    """Read options; those that are taken are none that no training has."""
    given = json.loads(path.read_text(encoding="utf-8"))
    words = [word for name, value in given.items() for word in (name, *_words(name, value))]
    options = read_options(words, _SETTINGS)
    for name, value in vars(options).items():
        assert _makes_sense(name, value), (name, value)


def _words(name: str, value: object) -> list[str]:
    """Return a value as words of a command line; where it is empty, the option stands alone."""
    text = _text(value)
    return text.split() if name == "--betas" else [text] if text else []


def _text(value: object) -> str:
    """Return a value as a shell hands it on, which has no NUL."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\0", "")


def _makes_sense(name: str, value: object) -> bool:
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return 0 <= value < (2**63 if name == "seed" else MOST_STEPS + 1)
    if isinstance(value, tuple):  # betas
        return all(0 <= one < 1 for one in value)
    if isinstance(value, Fraction):
        return 0 < value <= MOST_EPOCHS
    if isinstance(value, float):
        return name == "clip" or math.isfinite(value)
    return bool(str(value).strip()) and not isinstance(value, argparse.Namespace)
