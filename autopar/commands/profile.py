"""`autopar profile`: measures times that replace formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from autopar.console import print_json, results, status_line
from autopar.options import ARG, MODEL, seconds, whole
from autopar.pages.other_pages import profile_page, profile_summary
from autopar.planner.axes.infer import infer_axes
from autopar.planner.errors import InputError
from autopar.planner.files import MOST_DEVICES, check_writable
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.precision import Precision, precision_words
from autopar.planner.profile.measured import (
    FILE_NAME,
    MeasuredFile,
    content_hash,
    read_measurements,
    write_measurements,
)
from autopar.planner.profile.net import measure_net
from autopar.planner.profile.profile import ProfileRequest, local_device
from autopar.planner.profile.profile import profile as measure_ops
from autopar.planner.trace import trace

_BATCHES = [1, 2, 4, 8]
_MOST_PROCESSES = 256  # on one machine
_OP_SHARE = 0.1  # largest share of the whole time that one op may take


def profile(
    model: MODEL,
    arg: ARG = None,
    batch: Annotated[
        list[int] | None,
        whole("--batch", least=1, most=2**31, text="Rows of a microbatch; several may be given."),
    ] = None,
    tensor: Annotated[
        str, typer.Option("--tensor", metavar="N,…", help="Tensor degrees to measure ops for.")
    ] = "1",
    precision: Annotated[
        str, typer.Option("--precision", metavar="TYPE", help=f"{precision_words()}.")
    ] = "bf16",
    net: Annotated[
        bool, typer.Option("--net", help="Also measure collectives between processes.")
    ] = False,
    procs: Annotated[
        int | None,
        whole(
            "--procs",
            least=2,
            most=_MOST_PROCESSES,
            text="Processes for --net. Default: the GPUs here, but at least 2.",
        ),
    ] = None,
    budget: Annotated[float, seconds("--budget", text="Time for all ops together.")] = 60.0,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="File to write the times to.")
    ] = Path(FILE_NAME),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure a model's ops on this machine; `autopar plan --profile FILE` uses the figures.

    Example: autopar profile models_zoo/gpt2.py --arg size=124m --batch 8 --tensor 1,2 --net
    """
    request = ProfileRequest(
        batches=tuple(dict.fromkeys(batch or _BATCHES)),
        degrees=_degrees(tensor),
        precision=_precision(precision),
        total_seconds=budget,
        op_seconds=_OP_SHARE * budget,
    )
    check_writable(output)
    before = read_measurements(output) if output.exists() else MeasuredFile()
    model_file = load_model_file(model, arg or ())
    with status_line("tracing the model") as report:
        graph = trace(model_file, precision=request.precision)
        axes = infer_axes(graph)
        profiled = measure_ops(graph, axes, find_layers(graph, axes), request, report=report)
        found = profiled.measured
        if net:
            report("measuring collectives")
            place = local_device()
            link = measure_net(
                device_name=place.device.name,
                device=place.torch_name,
                ranks=procs or max(2, torch.cuda.device_count()),
            )
            found = MeasuredFile(ops=found.ops, hosts=found.hosts, nets=(link,))
    together = before.merged(found)
    write_measurements(together, output)
    if as_json:
        page = profile_summary(found, profiled.left_out, seconds=profiled.seconds)
        data = {**page, "file": str(output), "content_hash": content_hash(together)}
        print_json(data)
        return
    for part in profile_page(found, profiled.left_out, seconds=profiled.seconds):
        results().print(part)
    written = f"Written: {output} ({len(together.ops)} ops in all)"
    results().print(written, soft_wrap=True)


def _degrees(text: str) -> tuple[int, ...]:
    try:
        degrees = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        degrees = ()
    if not degrees or min(degrees) < 1 or max(degrees) > MOST_DEVICES:
        raise InputError(
            f"{text!r} lists no tensor degrees",
            where="--tensor",
            expected=f"such as 1,2,4; at most {MOST_DEVICES}",
        )
    return degrees


def _precision(text: str) -> Precision:
    try:
        return Precision(text)
    except ValueError:
        known = ", ".join(one.value for one in Precision)
        raise InputError(f"{text!r} is no precision", where="--precision", expected=known) from None
