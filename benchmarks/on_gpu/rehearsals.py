"""Rehearses a rank of large plans as users do, with `autopar plan` and `autopar rehearse`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.planned import ZOO, device_here
from benchmarks.on_gpu.report import Row, error_text

TABLE = "Rehearsals: a rank of a plan, without its messages"
_LEAST_SECONDS = 30.0  # with less time left, no rank is started

PLANS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "Llama 8B on 8": ("llama.py", "--arg", "size=8b", "--gpus", "8"),
        "Llama 70B on 64": (
            *("llama.py", "--arg", "size=70b", "--gpus", "64"),
            *("--pin", "pp=8,tp=8,schedule=1f1b"),
        ),
    }
)
TINY: Mapping[str, Sequence[str]] = MappingProxyType(
    {"tiny on 2": ("gpt2.py", "--arg", "size=tiny", "--gpus", "2", "--pin", "pp=2")}
)


def rehearsals(context: Context) -> Iterator[Row]:
    """Yield a row for the first rank of each plan; all plans are made at the same time."""
    device = context.alone(device_here)
    context.end()  # a rank needs the memory of the device
    with TemporaryDirectory(prefix="rehearsals-") as folder:
        plans = TINY if context.tiny else PLANS
        places = {name: Path(folder) / str(number) for number, name in enumerate(plans)}
        planning = {
            name: _autopar("plan", str(ZOO / file), *words, "--device", device, "-o", str(place))
            for place, (name, (file, *words)) in zip(places.values(), plans.items(), strict=True)
        }
        for name, process in planning.items():
            if context.seconds_left < _LEAST_SECONDS:
                process.kill()
                continue
            try:
                _printed(process, context.seconds_left)
                rehearsing = _autopar("rehearse", str(places[name]), "--rank", "0", "--json")
                found = json.loads(_printed(rehearsing, context.seconds_left))
            except Exception as error:
                yield Row(table=TABLE, cells={"plan": name, "error": error_text(error)})
                continue
            yield from _rows(name, found["ranks"])


def _rows(name: str, ranks: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    for one in ranks:
        peak = one["peak_bytes"]
        yield Row(
            table=TABLE,
            cells={
                "plan": name,
                "pipeline rank": one["pipeline_rank"],
                "computing, s": one["predicted_seconds"],
                "measured, s": one["seconds"],
                "error": f"{one['predicted_seconds'] / one['seconds'] - 1:+.1%}",
                "reserved, GiB": one["predicted_bytes"] / 2**30,
                "measured, GiB": None if peak is None else peak / 2**30,
            },
        )


def _autopar(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "autopar", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _printed(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for a command, and return its standard output."""
    try:
        printed, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(said)
    return printed
