"""`autopar inspect`, `profile`, `dryrun`, `rehearse`: look at a model, or train one rank of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import networkx as nx
import torch
import typer

from autopar.codegen.proof.dryrun.running import (
    DryRun,
    Rehearsal,
    distinct_ranks,
    dry_run,
    rehearse,
)
from autopar.commands import AS_JSON
from autopar.console import print_json, print_note, results, status_line
from autopar.options import ARG, CACHE, DEVICE, MODEL, MOVED_MODEL, PLAN, seconds, whole
from autopar.pages.other_pages import ops_table, page, profile_page, profile_summary
from autopar.pages.plan_page import plain_table
from autopar.planner.annotate import annotated_graph, annotated_ops
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import device_for
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.errors import InputError
from autopar.planner.files import MOST_DEVICES, check_writable, refuse_others, write_whole
from autopar.planner.findings import with_moments
from autopar.planner.findings.optimizer import optimizer_traits
from autopar.planner.inspection import inspect_graph
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.traced import with_model
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
from autopar.planning import traced_plan

PRECISION = Annotated[
    Precision, typer.Option("--precision", metavar="TYPE", help=f"{precision_words()}.")
]
_BEGINNINGS = {
    ".graphml": "<!-- The ops of a model, written by autopar. -->",
    ".dot": "// The ops of a model, written by autopar.",
}


def check_destination(path: Path) -> None:
    """Reject a path that is no graph file, or a file that autopar did not write."""
    beginning = _BEGINNINGS.get(path.suffix)
    if beginning is None:
        raise InputError(
            f"{path} is no name of a graph file", expected="a file .graphml, or .dot for Graphviz"
        )
    refuse_others(path, beginning=beginning)


def write_graph(graph: nx.MultiDiGraph, path: Path) -> None:
    """Write a graph in the format of the path's ending."""
    lines = nx.generate_graphml(graph) if path.suffix == ".graphml" else _dot(graph)
    write_whole(path, "\n".join([_BEGINNINGS[path.suffix], *lines, ""]), what="the graph")


def _dot(graph: nx.MultiDiGraph) -> Iterator[str]:
    yield "digraph {"
    for name, attributes in graph.nodes(data=True):
        yield f"  {_quoted(name)} [{_listed(attributes)}];"
    for maker, reader, attributes in graph.edges(data=True):
        yield f"  {_quoted(maker)} -> {_quoted(reader)} [{_listed(attributes)}];"
    yield "}"


def _listed(attributes: Mapping[str, Any]) -> str:
    # Graphviz draws nodes in the form that their attribute `shape` names.
    names = {key: "dims" if key == "shape" else key for key in attributes}
    return ", ".join(f"{names[key]}={_quoted(value)}" for key, value in attributes.items())


def _quoted(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def inspect(
    model: MODEL,
    arg: ARG = None,
    batch: Annotated[
        int, whole("--batch", least=1, text="Rows of a microbatch, whose costs are shown.")
    ] = 1,
    ops: Annotated[
        bool, typer.Option("--ops", help="List the ops: FLOPs, bytes moved and saved, seconds.")
    ] = False,
    graph_file: Annotated[
        Path | None,
        typer.Option(
            "--graph", metavar="FILE", help="Write the annotated graph: .graphml or .dot."
        ),
    ] = None,
    device: DEVICE = None,
    precision: PRECISION = Precision.BF16,
    as_json: AS_JSON = False,
) -> None:
    """Show what autopar understands of a model: parameters, layers, axes, costs.

    With --ops or --graph FILE, show each op, not split, on a --device in a --precision.

    Example: autopar inspect models_zoo/gpt2.py --arg size=124m --batch 8
    """
    if graph_file is not None:
        check_destination(graph_file)
    model_file = load_model_file(model, arg or ())
    shows_ops = ops or graph_file is not None
    with status_line("tracing the model"):
        graph = trace(model_file, precision=precision if shows_ops else Precision.FP32)
    if shows_ops:
        rows, on = graph.fixed_batch or batch, device_for(device)[0]
        annotated = annotated_ops(graph, batch=rows, precision=precision, device=on)
        if graph_file is not None:
            nodes = annotated_graph(graph, annotated, batch=rows, precision=precision)
            write_graph(nodes, graph_file)
        if as_json:
            print_json([asdict(one) for one in annotated])
            return
        if graph_file is not None:
            results().print(f"Written: {graph_file}", soft_wrap=True)
        if ops:
            results().print(ops_table(annotated, on, precision, batch=rows))
        return
    with status_line("inspecting the model"):
        optimizer = optimizer_traits(model_file, graph)
        inspection = inspect_graph(
            with_moments(graph, optimizer),
            model=model_file.name,
            batch=batch,
            optimizer=optimizer.name if optimizer else "AdamW",
        )
    if as_json:
        print_json(asdict(inspection))
        return
    for part in page(inspection):
        results().print(part)


def dryrun(
    plan: PLAN,
    model: MOVED_MODEL = None,
    rank: Annotated[int, whole("--rank", least=0, metavar="R", text="The rank, from 0.")] = 0,
    cache: CACHE = True,
    as_json: AS_JSON = False,
) -> None:
    """Run the script's own code for one rank, without computing, at the full number of ranks.

    Shows the rank's peak memory beside the prediction, and every collective of a step. Needs no GPU
    and no other rank.

    Example: autopar dryrun out/plan.json --rank 3
    """
    folder = plan if plan.is_dir() else plan.parent
    found = traced_plan(with_model(read_plan(plan), folder, model), folder, uses_cache=cache)
    with status_line(f"running rank {rank} of {found.arrangement.ranks} without computing"):
        report = dry_run(found, folder, rank=rank)
    if as_json:
        print_json({**asdict(report), "error": report.error})
        return
    _tell(report)


def _tell(report: DryRun) -> None:
    memory = plain_table(f"Memory of rank {report.rank} at its peak", "", "bytes", left=1)
    for name, size in sorted(report.peak_bytes_by_category.items(), key=lambda item: -item[1]):
        memory.add_row(name, bytes_text(size))
    memory.add_row("in all", bytes_text(report.peak_bytes))
    memory.add_row("predicted", f"{bytes_text(report.predicted_bytes)} ({report.error:+.1%})")
    results().print(memory)
    if report.predicted_host_bytes:
        results().print(
            f"In the host's memory: {bytes_text(report.host_bytes)}, predicted "
            f"{bytes_text(report.predicted_host_bytes)}.",
            soft_wrap=True,
        )
    beside = report.predicted_device_bytes - report.predicted_bytes
    results().print(
        f"These are tensors. The plan's {bytes_text(report.predicted_device_bytes)} for this "
        f"rank's stage include {bytes_text(beside)} that a dry run cannot see: what the allocator "
        "loses between tensors, the device's context, and communication libraries.",
        soft_wrap=True,
    )
    if report.runs_uncompiled:
        results().print(
            "In a dry run, compiled layers run op by op, which takes more memory. The predicted "
            "figure is for compiled layers.",
            soft_wrap=True,
        )
    sent = plain_table("Collectives of one step", "", "ranks", "bytes", "count", left=1)
    for one in report.collectives:
        figures = (str(one["ranks"]), bytes_text(one["bytes"]), f"{one['count']:,}")
        sent.add_row(one["kind"], *figures)
    results().print(sent)


def rehearse_plan(
    plan: PLAN,
    model: MOVED_MODEL = None,
    rank: Annotated[
        int | None,
        whole(
            "--rank",
            least=0,
            metavar="R",
            text="Only this pipeline rank. Default: one of each group with equal predictions.",
        ),
    ] = None,
    steps: Annotated[int, whole("--steps", least=1, metavar="N", text="Steps to measure.")] = 5,
    cache: CACHE = True,
    as_json: AS_JSON = False,
) -> None:
    """Measure ranks of a plan on the one device of this machine, without the other ranks.

    Each rank computes as in training, without its messages. Then the step is predicted again, from
    the measured compute times and the predicted messages. So one rented GPU tests a plan for 512.

    Example: autopar rehearse out/plan.json
    """
    folder = plan if plan.is_dir() else plan.parent
    found = traced_plan(with_model(read_plan(plan), folder, model), folder, uses_cache=cache)
    pipeline = found.arrangement.pipeline
    if rank is not None and rank >= pipeline:
        raise InputError(f"there is no pipeline rank {rank}", expected=f"0 to {pipeline - 1}")
    chosen = distinct_ranks(found) if rank is None else [rank]
    with status_line(f"measuring {len(chosen)} of {pipeline} pipeline ranks, one after the other"):
        rehearsal = rehearse(found, folder, pipeline_ranks=chosen, steps=steps)
    if as_json:
        print_json(asdict(rehearsal))
        return
    _tell_rehearsal(found, rehearsal)


def _tell_rehearsal(plan: Plan, found: Rehearsal) -> None:
    here = local_device().name
    is_cpu = found.ranks[0].peak_bytes is None
    heads: tuple[str, ...] = ("computing", "predicted", "measured ÷ predicted")
    heads += () if is_cpu else ("memory", "predicted")
    table = plain_table(f"Measured on this {here}", "pipeline rank", *heads, left=1)
    for one in found.ranks:
        held = () if one.peak_bytes is None else (one.peak_bytes, one.predicted_bytes)
        table.add_row(
            str(one.pipeline_rank),
            seconds_text(one.seconds),
            seconds_text(one.predicted_seconds),
            f"{one.factor:.2f}",
            *map(bytes_text, held),
        )
    results().print(table)
    results().print(
        f"step: {seconds_text(found.predicted_step_seconds)} predicted, "
        f"{seconds_text(found.step_seconds)} with these measured times and messages as predicted",
        soft_wrap=True,
    )
    if here not in {device.name for device in plan.cluster.devices}:
        print_note(f"the plan is for {plan.machines.device}; this machine has {here}")


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
    precision: PRECISION = Precision.BF16,
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
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to add the times to, made if needed."
        ),
    ] = Path(FILE_NAME),
    as_json: AS_JSON = False,
) -> None:
    """Measure a model's ops on this machine; `autopar plan --profile FILE` uses the figures.

    Example: autopar profile models_zoo/gpt2.py --arg size=124m --batch 8 --tensor 1,2 --net
    """
    request = ProfileRequest(
        batches=tuple(dict.fromkeys(batch or _BATCHES)),
        degrees=_degrees(tensor),
        precision=precision,
        total_seconds=budget,
        op_seconds=_OP_SHARE * budget,
    )
    check_writable(output)
    before = _measured_before(output)
    model_file = load_model_file(model, arg or ())
    with status_line("tracing the model") as report:
        graph = trace(model_file, precision=request.precision)
        axes = infer_axes(graph)
        profiled = measure_ops(graph, axes, find_layers(graph, axes), request, report=report)
        found = profiled.measured
        if net:
            report("measuring collectives")
            here = local_device()
            link = measure_net(
                device_name=here.name,
                device=here.torch_name,
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


def _measured_before(path: Path) -> MeasuredFile:
    """Return the measurements in a file to which others will be added."""
    try:
        return read_measurements(path) if path.exists() else MeasuredFile()
    except InputError as error:
        raise InputError(
            error.found,
            where=error.where,
            expected=error.expected,
            fix="choose another file with -o, or move this one away",
        ) from None


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
