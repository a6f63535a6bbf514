"""Compares scripts for one device with plain PyTorch, and predictions with the scripts.

Each model is planned in bf16 for the device, by formulas and with a profile of its ops. Its script,
the same training in plain PyTorch, and this training with compiled layers each run in a process of
their own. The ratio is plain time ÷ script time; without compiling, at least 0.99 is the aim. Peaks
count what torch allocates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.kernels import short
from benchmarks.on_gpu.planned import Case, Planned, device_here, planned, planned_by_profile
from benchmarks.on_gpu.report import Cell, Row, error_text
from benchmarks.on_gpu.sides import Job, Taken, taken

SAME_LOSS = 0.01  # relative, in bf16, after a few steps
TABLE = "Steps: the script beside plain PyTorch"
PREDICTED = "Steps: what is predicted of the script"
TERMS = "Steps: terms of the prediction, by formulas"
KINDS = "Steps: kernels of one step by kind, and the prediction of ops by kind"
LARGEST = "Steps: kernels that take most"
MEMORY = "Steps: what is allocated"

CASES = (
    Case(name="Llama 1B", file="llama.py", arguments=("size=1b", "seq_len=4096"), rows=2),
    Case(name="GPT-2 124M", file="gpt2.py", arguments=("size=124m", "dropout=0.0"), rows=16),
    Case(name="ResNet-50", file="resnet.py", arguments=("size=50",), rows=128),
    Case(name="ViT-L", file="vit.py", arguments=("size=l16", "dropout=0.0"), rows=64),
)
TINY = (Case(name="tiny", file="gpt2.py", arguments=("size=tiny", "dropout=0.0"), rows=8),)
_ROUNDS = (("script", "plain"), ("plain, compiled",))
_LEAST_SECONDS = 15.0  # with less time left, no side is started
_SECONDS, _PROFILE_SECONDS = 3.0, 8.0  # for the measured steps, and for a profile's ops
_MOST_SECONDS = 150.0  # for one side


def steps(context: Context) -> Iterator[Row]:
    """Yield rows of all models: eager, then compiled, then the predictions with profiles."""
    cases = [one for one in CASES if not context.models or one.name in context.models]
    yield from rows_of(context, TINY if context.tiny else cases, _ROUNDS)


def rows_of(
    context: Context, cases: Sequence[Case], rounds: Sequence[Sequence[str]]
) -> Iterator[Row]:
    """Yield rows of models round by round; plans are made in other processes meanwhile."""
    device = context.alone(device_here)
    planners = ProcessPoolExecutor(
        1 if context.tiny else len(cases), mp_context=get_context("spawn")
    )
    scripts: dict[str, Taken] = {}
    with TemporaryDirectory(prefix="on-gpu-") as folder, planners:
        places = {case: f"{folder}/{number}" for number, case in enumerate(cases)}
        coming = {one: planners.submit(planned, one, device, own) for one, own in places.items()}
        for sides, case in product(rounds, cases):
            if context.seconds_left < _LEAST_SECONDS:
                return
            try:
                found = coming[case].result(context.seconds_left)
                job = _job(case, Path(places[case]), is_tiny=context.tiny)
                yield from _rows_of_case(context, case, found, job, sides, scripts)
            except Exception as error:
                yield Row(table=TABLE, cells={"model": case.name, "error": error_text(error)})
        for case in cases:
            if case.is_profiled:
                yield from _profiled_rows(context, case, scripts.get(case.name))


def _job(case: Case, folder: Path, *, is_tiny: bool) -> Job:
    return Job(
        script=folder / "train.py",
        spec=case.spec,
        arguments=case.arguments,
        rows=case.rows,
        seconds=0.1 if is_tiny else _SECONDS,
    )


def _rows_of_case(
    context: Context,
    case: Case,
    found: Planned,
    job: Job,
    sides: Sequence[str],
    scripts: dict[str, Taken],
) -> Iterator[Row]:
    """Yield rows of some sides; the first script of a model is remembered."""
    for side in sides:
        try:
            one = context.fresh(taken, side, job, seconds=_MOST_SECONDS)
        except Exception as error:
            yield Row(
                table=TABLE, cells={"model": case.name, "side": side, "error": error_text(error)}
            )
            continue
        if side.startswith("script"):
            scripts.setdefault(case.name, one)
        yield _side_row(case, side, one, scripts.get(case.name))
        if side == "script":
            yield from _predicted_rows(case, found, one, "formulas")
            yield _term_row(case, found, one)
        yield from _kernel_rows(case, side, one, found if side == "script" else None)


def _profiled_rows(context: Context, case: Case, own: Taken | None) -> Iterator[Row]:
    """Yield the predictions with a profile of a case's ops."""
    seconds = 1.0 if context.tiny else _PROFILE_SECONDS
    if own is None or context.seconds_left < 4 * seconds:
        return
    device = context.alone(device_here)
    try:
        measured = context.fresh(planned_by_profile, case, device, seconds, seconds=90)
    except Exception as error:
        cells = {"model": case.name, "by": "profile", "error": error_text(error)}
        yield Row(table=PREDICTED, cells=cells)
    else:
        yield from _predicted_rows(case, measured, own, "profile")


def _side_row(case: Case, side: str, one: Taken, own: Taken | None) -> Row:
    cells: dict[str, Cell] = {
        "model": case.name,
        "rows": case.rows,
        "side": side,
        "ms": 1e3 * one.step_seconds,
        "ratio": None if own is None else one.step_seconds / own.step_seconds,
        "peak GiB": None if one.peak_bytes is None else one.peak_bytes / 2**30,
        "loss": one.loss,
        "seconds until it ran": one.seconds_before,
        "note": "" if own is None or _is_same(one.loss, own.loss) else "ANOTHER LOSS",
    }
    return Row(table=TABLE, cells=cells)


def _is_same(loss: float, own: float) -> bool:
    return abs(loss - own) <= SAME_LOSS * abs(own)


def _predicted_rows(case: Case, found: Planned, own: Taken, way: str) -> Iterator[Row]:
    step = own.step_seconds
    yield Row(
        table=PREDICTED,
        cells={
            "model": case.name,
            "by": way,
            "what": "step, ms",
            "predicted": 1e3 * found.step_seconds,
            "measured": 1e3 * step,
            "error": f"{found.step_seconds / step - 1:+.1%}",
        },
    )
    if own.peak_bytes is not None:
        size = found.memory.allocated_bytes
        yield Row(
            table=PREDICTED,
            cells={
                "model": case.name,
                "by": way,
                "what": "peak, GiB",
                "predicted": size / 2**30,
                "measured": own.peak_bytes / 2**30,
                "error": f"{size / own.peak_bytes - 1:+.1%}",
            },
        )


def _term_row(case: Case, found: Planned, own: Taken) -> Row:
    terms = {f"{one.name}, ms": 1e3 * one.seconds for one in found.terms if one.seconds}
    memory = found.memory
    parts = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activation_bytes,
        "transient": memory.transient_bytes,
    }
    sizes = {f"{name}, GiB": size / 2**30 for name, size in parts.items()}
    cells: dict[str, Cell] = {
        "model": case.name,
        **terms,
        **sizes,
        "measured, ms": 1e3 * own.step_seconds,
    }
    return Row(table=TERMS, cells=cells)


def _kernel_rows(case: Case, side: str, one: Taken, found: Planned | None) -> Iterator[Row]:
    """Yield what the GPU did in a step and, for a script, what was predicted."""
    if one.memory:
        sizes = {place: size / 2**30 for place, size in one.memory.items()}
        yield Row(table=MEMORY, cells={"model": case.name, "side": side, **sizes})
    measured = {} if one.kernels is None else one.kernels.seconds
    if measured:
        cells = {kind: 1e3 * seconds for kind, seconds in measured.items()}
        yield Row(table=KINDS, cells={"model": case.name, "side": f"{side}, ms", **cells})
    if found is not None:
        cells = {kind: 1e3 * seconds for kind, seconds in found.seconds_by_kind.items()}
        yield Row(table=KINDS, cells={"model": case.name, "side": "predicted, ms", **cells})
    largest = () if one.kernels is None or side != "script" else one.kernels.largest
    for name, seconds, calls in largest:
        yield Row(
            table=LARGEST,
            cells={
                "model": case.name,
                "side": side,
                "ms": 1e3 * seconds,
                "calls": calls,
                "kernel": short(name),
            },
        )
