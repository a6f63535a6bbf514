"""`autopar dryrun`: runs one rank of a script without computing; shows memory and collectives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from autopar.codegen.proof.dryrun.running import DryRun, dry_run
from autopar.commands.emit import MODEL, PLAN
from autopar.console import print_json, progress, results
from autopar.options import CACHE, whole
from autopar.pages.plan_page import plain_table
from autopar.planner.cluster.toml_reading import bytes_text
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.traced import with_model
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
    beside = report.predicted_device_bytes - report.predicted_bytes
    results().print(
        f"These are tensors. The plan's {bytes_text(report.predicted_device_bytes)} for this "
        f"rank's stage have {bytes_text(beside)} more that no dry run sees: what the allocator "
        "loses between tensors, the device's context and communication libraries.",
        soft_wrap=True,
    )
    sent = plain_table("Collectives of one step", "", "ranks", "bytes", "count", left=1)
    for one in report.collectives:
        figures = (str(one["ranks"]), bytes_text(one["bytes"]), f"{one['count']:,}")
        sent.add_row(one["kind"], *figures)
    results().print(sent)
