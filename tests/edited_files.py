"""The files that people give, and what reads each: what is edited in them at random."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from random import Random
from types import FrameType

import torch
from safetensors.torch import save
from torch import nn

from autopar.codegen.emit import emit
from autopar.planner.cluster.file import read_cluster
from autopar.planner.errors import AutoparError
from autopar.planner.graph.graph import Graph
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.files.document import plan_text, read_plan
from autopar.planner.plan.plan import with_graph
from autopar.planner.profile.measured import measurements_text, read_measurements
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.weights.loading import load_safetensors
from benchmarks.validation.table import read_table
from tests.codegen.plans import pinned_plan
from tests.edited_files_of_trainings import kinds_of_trainings
from tests.planner.profile.measurements import everything
from tests.random_edits import Edit, Edited, edited_json, edited_text

ROOT = Path(__file__).parents[1]
_LONGEST_SECONDS = 20
# A wrong value there may be a right one of another plan: it is told in comments, or trained with.
_FREE = (
    "autopar",
    "model.name",
    "model.tokens_per_row",
    "proof",
    "prediction",
    "arrangement",
    "machines.limit_bytes",
)
_WITHOUT_PLACE = {  # another program's file; a model file that is not found
    "format": ("",),
    "model": ("",),
}


@cache
def kinds() -> Mapping[str, Edited]:
    """Return each kind of file that people give by its name."""
    return {one.name: one for one in _made()}


def _made() -> Iterator[Edited]:
    made = pinned_plan("mnist.py", tensor=2)
    plan = plan_text(made).encode()
    constraints = partial(gathered_constraints, (), {})
    table = ROOT / "tests/benchmarks/validation/measured_memory.csv"
    measured = measurements_text(everything(), written="today").encode()
    weights = save(nn.Linear(4, 4).state_dict())
    yield Edited(
        name="plan.json",
        source=plan,
        edit=edited_json,
        read=partial(_script, made.graph),
        free=_FREE,
        words=_WITHOUT_PLACE,
    )
    for name, source, read in (
        ("cluster.toml", _example("cluster-file.md"), read_cluster),
        ("constraints.toml", _example("constraints-file.md"), constraints),
        ("runs.csv", b"".join(table.read_bytes().splitlines(keepends=True)[:6]), read_table),
        ("measured.toml", measured, read_measurements),
        ("weights.safetensors", weights, _loaded),
    ):
        yield Edited(name=name, source=source, edit=edited_text, read=read)
    yield from kinds_of_trainings()


def _example(page: str) -> bytes:
    found = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1].encode()


def _script(graph: Graph, path: Path) -> str:
    return emit(with_graph(read_plan(path), graph), destination=path.parent / "train.py")


def _loaded(path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    load_safetensors(model, path, {}, Axis(0, 1, None), device=torch.device("cpu"))


def faults(kind: Edited, folder: Path, seeds: Iterator[int]) -> Iterator[str]:
    """Yield what goes wrong when a file is edited with these seeds, and read."""
    path = folder / kind.name
    for name, content in {**kind.beside, kind.name: kind.source}.items():
        (folder / name).write_bytes(content)
    right = kind.read(path)
    before = _names(folder)
    for seed in seeds:
        edit = kind.edit(kind.source, Random(seed))
        path.write_bytes(edit.content)
        fault = _fault(kind, path, edit, right)
        if not fault and _names(folder) != before:
            fault = "other files are there than before"
        if fault:
            yield f"{kind.name} {seed}: {edit}: {fault}"


def _fault(kind: Edited, path: Path, edit: Edit, right: object) -> str:
    """Return what is wrong with how an edit was taken, or nothing."""
    outer = "" if kind.edit is edited_text else edit.place.partition(".")[0]
    try:
        with _ended_after(_LONGEST_SECONDS):
            found = kind.read(path)
    except AutoparError as error:
        is_told = any(word in str(error) for word in (outer, *kind.words.get(outer, ())))
        return "" if is_told else f"refused without its place: {error}"
    except SystemExit:  # how scripts refuse
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    is_other = bool(outer) and found != right and not edit.place.startswith(kind.free)
    return "changes the script" if is_other else ""


@contextmanager
def _ended_after(seconds: int) -> Iterator[None]:
    def end(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _names(folder: Path) -> frozenset[Path]:
    return frozenset(place for place in (*folder.rglob("*"), *Path().iterdir()))


KINDS: Mapping[str, int] = {
    "plan.json": 160,
    "cluster.toml": 150,
    "constraints.toml": 150,
    "runs.csv": 150,
    "measured.toml": 150,
    "weights.safetensors": 100,
    "checkpoint.json": 150,
    "run.json": 100,
    "metrics.jsonl": 100,
    "options.json": 200,
    "options_of_epochs.json": 100,
}  # edits of each in the suite
