"""`autopar dryrun` and `rehearse`: one rank of a script, without computing or without messages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from autopar.codegen.proof.dryrun.rehearsing import Rehearsal, distinct_ranks, rehearse
from autopar.codegen.proof.dryrun.running import DryRun, dry_run
from autopar.commands.emit import MODEL, PLAN
from autopar.console import print_json, print_note, progress, results
from autopar.options import CACHE, whole
from autopar.pages.plan_page import plain_table
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.errors import InputError
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.traced import with_model
from autopar.planner.profile.profile import local_device
from autopar.planning import traced_plan


def dryrun(
    plan: PLAN,
    model: MODEL = None,
    rank: Annotated[int, whole("--rank", least=0, metavar="R", text="The rank, from 0.")] = 0,
    cache: CACHE = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Run the script's own code for one rank, without computing, at the full number of ranks.

    Shows the rank's peak memory beside the prediction, and every collective of a step. Needs no GPU
    and no other rank.

    Example: autopar dryrun out/plan.json --rank 3
    """
    folder = plan if plan.is_dir() else plan.parent
    found = traced_plan(with_model(read_plan(plan), folder, model), folder, uses_cache=cache)
    with progress(f"running rank {rank} of {found.arrangement.ranks} without computing"):
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
        f"rank's stage have {bytes_text(beside)} more that no dry run sees: what the allocator "
        "loses between tensors, the device's context and communication libraries.",
        soft_wrap=True,
    )
    if report.runs_uncompiled:
        results().print(
            "A dry run executes compiled layers op by op. Compiled, they hold less, as predicted.",
            soft_wrap=True,
        )
    sent = plain_table("Collectives of one step", "", "ranks", "bytes", "count", left=1)
    for one in report.collectives:
        figures = (str(one["ranks"]), bytes_text(one["bytes"]), f"{one['count']:,}")
        sent.add_row(one["kind"], *figures)
    results().print(sent)


def rehearse_plan(
    plan: PLAN,
    model: MODEL = None,
    rank: Annotated[
        int | None,
        whole("--rank", least=0, metavar="R", text="A pipeline rank. Default: one of each stage."),
    ] = None,
    steps: Annotated[int, whole("--steps", least=1, metavar="N", text="Steps to measure.")] = 5,
    cache: CACHE = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure ranks of a plan on the one device of this machine, without the other ranks.

    A rank computes as in training, and its messages are left out. Then tells the step again with
    the measured compute and the predicted messages: one rented GPU before 512.

    Example: autopar rehearse out/plan.json
    """
    folder = plan if plan.is_dir() else plan.parent
    found = traced_plan(with_model(read_plan(plan), folder, model), folder, uses_cache=cache)
    pipeline = found.arrangement.pipeline
    if rank is not None and rank >= pipeline:
        raise InputError(f"there is no pipeline rank {rank}", expected=f"0 to {pipeline - 1}")
    chosen = distinct_ranks(found) if rank is None else [rank]
    with progress(f"measuring {len(chosen)} of {pipeline} pipeline ranks, one after the other"):
        rehearsal = rehearse(found, folder, pipeline_ranks=chosen, steps=steps)
    if as_json:
        print_json(asdict(rehearsal))
        return
    _tell_rehearsal(found, rehearsal)


def _tell_rehearsal(plan: Plan, found: Rehearsal) -> None:
    here = local_device().device.name
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
