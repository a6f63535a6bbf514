"""What `autopar profile` prints: the host, the ops that weigh most, the link, what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table

from autopar.pages.tables import plain_table
from autopar.planner.cluster.units import bandwidth_text, seconds_text
from autopar.planner.profile.measured import MeasuredFile, MeasuredOp
from autopar.planner.profile.rounds import LeftOut

_MOST_OPS = 12


def profile_summary(
    found: MeasuredFile, left_out: Sequence[LeftOut], *, seconds: float
) -> Mapping[str, object]:
    """Return the same for programs."""
    return {
        "measured_ops": len(found.ops),
        "seconds": seconds,
        "hosts": [asdict(host) for host in found.hosts],
        "nets": [asdict(net) for net in found.nets],
        "left_out": [
            {"op": one.probe.op.name, "target": one.probe.key.target, "reason": one.reason}
            for one in left_out
        ],
    }


def profile_page(
    found: MeasuredFile, left_out: Sequence[LeftOut], *, seconds: float
) -> Iterator[RenderableType]:
    """Yield the parts of the page."""
    yield f"{len(found.ops)} ops measured in {seconds_text(seconds)}"
    yield _host_table(found)
    if found.ops:
        yield _op_table(found.ops)
    if found.nets:
        yield _net_table(found)
    if left_out:
        yield _left_out_table(left_out)


def _host_table(found: MeasuredFile) -> Table:
    table = plain_table(
        "host", "device", "threads", "per op", "backward", "step", "a parameter", "10⁶ elements"
    )
    for host in found.hosts:
        times = host.times
        table.add_row(
            host.device,
            str(host.threads),
            seconds_text(times.forward_seconds),
            seconds_text(times.backward_seconds),
            seconds_text(times.step_seconds),
            seconds_text(times.optimizer_tensor_seconds),
            seconds_text(1e6 * times.optimizer_element_seconds),
        )
    return table


def _op_table(ops: Sequence[MeasuredOp]) -> Table:
    """The ops that take longest: one use of each."""
    table = plain_table("longest ops", "op", "operands", "forward", "backward", "samples", left=2)
    longest = sorted(ops, key=lambda one: -_seconds(one))[:_MOST_OPS]
    for one in longest:
        shapes = " ".join(str(list(operand.shape)) for operand in one.key.operands)
        table.add_row(
            one.key.target.removeprefix("aten."),
            shapes,
            _text(one.timing.forward_seconds),
            _text(one.timing.backward_seconds),
            str(one.samples),
        )
    return table


def _seconds(one: MeasuredOp) -> float:
    return one.timing.forward_seconds + one.timing.backward_seconds


def _net_table(found: MeasuredFile) -> Table:
    table = plain_table("link", "collective", "latency of a hop", "rate")
    for net in found.nets:
        title = f"all on {net.ranks} ranks of {net.device}"
        table.add_row(title, seconds_text(net.alpha_seconds), bandwidth_text(net.bytes_per_second))
        for one in net.collectives:
            table.add_row(
                one.collective,
                seconds_text(one.alpha_seconds),
                bandwidth_text(one.bytes_per_second),
            )
    return table


def _left_out_table(left_out: Sequence[LeftOut]) -> Table:
    table = plain_table("left out: formulas serve for these", "op", "reason", "shapes", left=2)
    reasons = Counter((one.probe.key.target, one.reason) for one in left_out)
    for (target, reason), count in reasons.most_common():
        table.add_row(target.removeprefix("aten."), reason, str(count))
    return table


def _text(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "0"
