"""What many GPUs would meet, as far as one can show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.on_gpu.context import Context, new_pool
from benchmarks.on_gpu.ranks.faults import fault_rows
from benchmarks.on_gpu.ranks.norms import norm_rows
from benchmarks.on_gpu.ranks.recomputation import recomputation_rows
from benchmarks.on_gpu.ranks.resuming import resume_rows
from benchmarks.on_gpu.ranks.scripts import script_rows
from benchmarks.on_gpu.ranks.syncs import sync_rows
from benchmarks.on_gpu.ranks.transport import transport_rows
from benchmarks.on_gpu.report import Row

CHECKS: tuple[Callable[[Context], Iterator[Row]], ...] = (
    transport_rows,
    recomputation_rows,
    script_rows,
    resume_rows,
    norm_rows,
    fault_rows,
    sync_rows,
)


def ranks(context: Context) -> Iterator[Row]:
    """Yield the rows of all checks; one that fails is told, and the next goes on."""
    if context.is_gpu:  # all of them import meanwhile
        context.pools |= {
            ranks: new_pool(ranks) for ranks in (1, 2, 4) if ranks not in context.pools
        }
    for check in CHECKS:
        try:
            yield from check(context)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            cells = {"check": check.__name__, "error": " ⏎ ".join([lines[0], *lines[-4:]])}
            yield Row(table="Ranks: checks that failed", cells=cells)
