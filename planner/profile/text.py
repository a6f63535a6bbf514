"""Turns measurements into the text of measured.toml."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version

from autopar.planner.cluster.link import MeasuredCollective
from autopar.planner.costs.ops.measurements import ActionTimes, Operand, PassTimes, UnitTimes
from autopar.planner.profile.measured import MeasuredFile, MeasuredHost, MeasuredNet, MeasuredOp

FORMAT = 6


def content_hash(measured: MeasuredFile) -> str:
    """Return 64 hexadecimal digits, the same for equal figures whenever they were written."""
    return hashlib.sha256(measurements_text(measured, written="").encode()).hexdigest()


def measurements_text(measured: MeasuredFile, *, written: str) -> str:
    """Return the text of measured.toml."""
    lines = [
        "# What `autopar profile` measured; figures stand in for autopar's formulas. Runs add up.",
        f"format = {FORMAT}",
        f"autopar = {_quoted(version('autopar'))}",
        f"written = {_quoted(written)}",
    ]
    for host in measured.hosts:
        lines += ["", "[[host]]", *_host_lines(host)]
    for net in measured.nets:
        lines += ["", "[[net]]", *_net_lines(net)]
    for op in measured.ops:
        lines += ["", "[[op]]", *_op_lines(op)]
    return "\n".join(lines) + "\n"


def _host_lines(host: MeasuredHost) -> list[str]:
    times = host.times
    return [
        f"device = {_quoted(host.device)}",
        f"threads = {host.threads}",
        f"torch = {_quoted(host.torch)}",
        f"dispatch_forward_seconds = {times.forward_seconds!r}",
        f"dispatch_backward_seconds = {times.backward_seconds!r}",
        f"action_seconds = {times.action_seconds!r}",
        f"step_seconds = {times.step_seconds!r}",
        f"optimizer_tensor_seconds = {times.optimizer_tensor_seconds!r}",
        f"optimizer_element_seconds = {times.optimizer_element_seconds!r}",
        *_table("host.passes", times.passes),
        *(_table("host.unit", times.unit) if times.unit else ()),
        *(_table("host.pipeline", times.pipeline) if times.pipeline else ()),
    ]


def _table(name: str, times: PassTimes | UnitTimes | ActionTimes) -> list[str]:
    figures = asdict(times).items()
    return ["", f"[{name}]", *(f"{key} = {seconds!r}" for key, seconds in figures)]


def _net_lines(net: MeasuredNet) -> list[str]:
    return [
        f"device = {_quoted(net.device)}",
        f"backend = {_quoted(net.backend.value)}",
        f"ranks = {net.ranks}",
        f"torch = {_quoted(net.torch)}",
        f"alpha_seconds = {net.alpha_seconds!r}",
        f"bytes_per_second = {net.bytes_per_second!r}",
        *(line for one in net.collectives for line in _collective_lines(one)),
    ]


def _collective_lines(one: MeasuredCollective) -> list[str]:
    sizes = ", ".join(str(size) for size, _ in one.points)
    seconds = ", ".join(repr(seconds) for _, seconds in one.points)
    return [
        "",
        "[[net.collectives]]",
        f"collective = {_quoted(one.collective)}",
        f"manner = {_quoted(one.manner.value)}",
        f"alpha_seconds = {one.alpha_seconds!r}",
        f"bytes_per_second = {one.bytes_per_second!r}",
        f"payload_bytes = [{sizes}]",
        f"seconds = [{seconds}]",
    ]


def _op_lines(op: MeasuredOp) -> list[str]:
    operands = ", ".join(_quoted(_operand_text(one)) for one in op.key.operands)
    arguments = ", ".join(f"{_quoted(k)} = {_quoted(v)}" for k, v in op.key.arguments)
    return [
        f"device = {_quoted(op.key.device)}",
        f"torch = {_quoted(op.torch)}",
        f"target = {_quoted(op.key.target)}",
        f"operands = [{operands}]",
        f"arguments = {{ {arguments} }}",
        f"precision = {_quoted(op.key.precision.value)}",
        f"forward_seconds = {op.timing.forward_seconds!r}",
        f"backward_seconds = {op.timing.backward_seconds!r}",
        f"samples = {op.samples}",
    ]


def _operand_text(operand: Operand) -> str:
    sizes = ", ".join(map(str, operand.shape))
    return f"{operand.dtype}[{sizes}]{' grad' if operand.requires_grad else ''}"


def _quoted(text: str) -> str:
    """Return a TOML string; JSON's escapes are TOML's too."""
    return json.dumps(text)
