"""Turns what is known of checkpoints into the tables that `autopar ckpt` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.checkpoints.checkpoint_difference import CheckpointDifference, TensorDifference
from autopar.checkpoints.kept_checkpoints import Kept
from autopar.pages.tables import plain_table
from autopar.planner.cluster.units import bytes_text
from autopar.runtime.keeping.finding import best_of
from autopar.runtime.ranks.locations import Location

_MOST_TOLD = 8  # of the tensors of one kind that differ most


def time_text(seconds: float) -> str:
    """Return a time since 1970 as people here read it."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def list_page(
    kept: Sequence[Kept], left: Sequence[tuple[Location, str]]
) -> Iterator[RenderableType]:
    """Yield a line for each checkpoint, and what else lies there."""
    best = best_of(one.folder for one in kept)
    evaluation = () if best is None else ("evaluation",)
    columns = ("checkpoint", "step", "rows", "written", "size", "plan", *evaluation, "")
    table = plain_table("", *columns, left=1)
    for one in kept:
        moment = one.manifest.moment if one.manifest else None
        is_best = moment is not None and best is not None and moment.step == best[0]
        whole = "whole, the best" if is_best else "whole"
        table.add_row(
            one.folder.name,
            f"{moment.step:,}" if moment else "?",
            f"{moment.rows:,}" if moment else "?",
            time_text(one.written_at),
            bytes_text(one.size_bytes),
            one.manifest.origin.degrees if one.manifest else "?",
            *("" if one.evaluation is None else f"{one.evaluation:.5f}" for _ in evaluation),
            Text("damaged", style="red") if one.faults else whole,
        )
    yield table
    yield from _faults(kept)
    for path, what in left:
        yield Text(f"{path.name}: {what}")


def verified_page(kept: Sequence[Kept]) -> Iterator[RenderableType]:
    """Yield what was found of each checkpoint after reading all of it."""
    for one in kept:
        if not one.faults and one.manifest is not None:
            count = len(one.manifest.files)
            files = "1 file" if count == 1 else f"{count} files"
            yield Text(f"{one.folder.name}: whole, {files}, {bytes_text(one.size_bytes)}")
    yield from _faults(kept)


def _faults(kept: Sequence[Kept]) -> Iterator[Text]:
    for one in kept:
        for fault in one.faults:
            yield Text.assemble((f"{one.folder.name}: damaged: ", "red"), fault)


def difference_page(found: CheckpointDifference, *, every: bool) -> Iterator[RenderableType]:
    """Yield the tensors that differ, the kinds of them one by one, those that differ most first."""
    for kind in dict.fromkeys(one.kind for one in found.tensors):
        own = [one for one in found.tensors if one.kind == kind]
        yield from _kind(kind, own, every=every)
    for kind, count in Counter(one.kind for one in found.numbers).items():
        first = next(one for one in found.numbers if one.kind == kind)
        values = f"{first.before} in A and {first.after} in B of {first.name}"
        yield Text(f"{kind}: {count} numbers differ, such as {values}")
    for text in found.unlike:
        yield Text(text)
    if found.is_equal:
        yield Text("Equal to the last bit.")


def _kind(
    kind: str, tensors: Sequence[TensorDifference], *, every: bool
) -> Iterator[RenderableType]:
    differing = sorted((one for one in tensors if not one.is_equal), key=_order)
    if not differing:
        yield Text(f"{kind}: all {len(tensors)} tensors are equal")
        return
    shown = differing if every else differing[:_MOST_TOLD]
    yield _table(f"{kind}: {len(differing)} of {len(tensors)} tensors differ", shown)
    if len(shown) < len(differing):
        yield Text(f"… and {len(differing) - len(shown)} more, by less (--all)")


def _order(one: TensorDifference) -> tuple[bool, float, str]:
    is_nan = one.largest != one.largest
    return not is_nan, 0.0 if is_nan else -one.largest, one.name


def _table(title: str, tensors: Sequence[TensorDifference]) -> Table:
    table = plain_table(title, "tensor", "elements that differ", "by at most", "largest in A")
    for one in tensors:
        count = f"{one.unequal:,} of {one.elements:,}"
        table.add_row(Text(one.name), count, f"{one.largest:.3g}", f"{one.largest_value:.3g}")
    return table
