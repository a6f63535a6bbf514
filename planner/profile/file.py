"""Reads and writes measured.toml, and refuses what holds no sound measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.planner.cluster.link import Backend, Manner, MeasuredCollective
from autopar.planner.cluster.toml_text import parsed
from autopar.planner.costs.collectives.choice import Collective
from autopar.planner.costs.ops.measurements import (
    ActionTimes,
    HostTimes,
    Operand,
    OpKey,
    PassTimes,
    Timing,
    UnitTimes,
)
from autopar.planner.destination import write_whole
from autopar.planner.errors import InputError, gathered
from autopar.planner.given import read_given
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile, MeasuredHost, MeasuredNet, MeasuredOp
from autopar.planner.profile.text import FORMAT, measurements_text

FILE_NAME = "measured.toml"
_EXPECTED = f"a {FILE_NAME} as `autopar profile` writes it"
_AGAIN = "measure again with `autopar profile`"
_MOST_TOLD = 5
_OPERAND = re.compile(r"(\w+)\[((?:\d{1,18}(?:, \d{1,18})*)?)\]( grad)?")
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Rows(BaseModel):
    """Nothing unknown, nothing coerced."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Unit(_Rows):
    gather_seconds: Seconds
    scatter_seconds: Seconds
    gather_byte_seconds: Seconds
    scatter_byte_seconds: Seconds


class _Passes(_Rows):
    checkpoint_seconds: Seconds
    selective_seconds: Seconds
    split_input_seconds: Seconds
    split_weight_seconds: Seconds


class _Pipeline(_Rows):
    plain_seconds: Seconds
    one_stage_seconds: Seconds
    several_stages_seconds: Seconds


class _Host(_Rows):
    device: str
    threads: Count
    torch: str
    dispatch_forward_seconds: Positive
    dispatch_backward_seconds: Positive
    action_seconds: Positive
    step_seconds: Positive
    optimizer_tensor_seconds: Seconds
    optimizer_element_seconds: Positive
    passes: _Passes
    unit: _Unit | None = None
    pipeline: _Pipeline | None = None


class _Collective(_Rows):
    collective: str
    alpha_seconds: Positive
    bytes_per_second: Positive
    manner: str
    payload_bytes: Annotated[list[Count], Field(min_length=1)]
    seconds: list[Positive]


class _Net(_Rows):
    device: str
    backend: str
    ranks: Annotated[int, Field(ge=2)]
    torch: str
    alpha_seconds: Positive
    bytes_per_second: Positive
    collectives: list[_Collective]


class _Op(_Rows):
    device: str
    torch: str
    target: str
    operands: list[Annotated[str, Field(pattern=f"^{_OPERAND.pattern}$")]]
    arguments: dict[str, str]
    precision: str
    forward_seconds: Seconds
    backward_seconds: Seconds
    samples: Count


class _File(_Rows):
    format: int
    autopar: str
    written: str
    host: list[_Host] = []
    net: list[_Net] = []
    op: list[_Op] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A value whose text must be one of some words."""

    value: str
    words: type[Backend] | type[Precision] | type[Collective] | type[Manner]
    where: str


def read_measurements(path: Path) -> MeasuredFile:
    """Return the measurements in a file."""
    source = read_given(path, what="the measurements file", expected=_EXPECTED, fix=_AGAIN)
    return parse_measurements(source, where=str(path))


def parse_measurements(source: str, *, where: str) -> MeasuredFile:
    """Return the measurements that a text holds; `where` names the text in messages."""
    table = _table(source, where)
    try:
        rows = _File.model_validate(table)
    except ValidationError as error:
        raise _damaged(_told(error), where) from None
    faults = list(_faults(rows))
    if faults:
        raise _damaged(faults, where)
    return MeasuredFile(
        ops=tuple(map(_op, rows.op)),
        hosts=tuple(map(_host, rows.host)),
        nets=tuple(map(_net, rows.net)),
    )


def _table(source: str, where: str) -> Mapping[str, Any]:
    try:
        table = parsed(source, where=where)
    except InputError as error:
        raise InputError(
            f"the measurements are damaged or cut off: {error.found}",
            where=error.where,
            expected=_EXPECTED,
            fix=_AGAIN,
        ) from None
    number = table.get("format")
    if type(number) is not int or "autopar" not in table:
        raise InputError("this TOML file holds no measurements", where=where, expected=_EXPECTED)
    if number != FORMAT:
        newer = "update autopar, or " if number > FORMAT else ""
        raise InputError(
            f"autopar {table['autopar']} wrote these measurements in format {number}",
            where=where,
            expected=f"format {FORMAT}, of this autopar",
            fix=newer + _AGAIN,
        )
    return table


def _told(error: ValidationError) -> list[str]:
    return [
        f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
        for one in error.errors(include_url=False, include_input=False)
    ]


def _faults(rows: _File) -> Iterator[str]:
    words = [
        *(_Field(value=one.backend, words=Backend, where="net") for one in rows.net),
        *(_Field(value=one.precision, words=Precision, where="op") for one in rows.op),
        *(
            _Field(value=value, words=words, where="net.collectives")
            for net in rows.net
            for one in net.collectives
            for value, words in ((one.collective, Collective), (one.manner, Manner))
        ),
    ]
    for net in rows.net:
        for measured in net.collectives:
            sizes, seconds = measured.payload_bytes, measured.seconds
            if len(sizes) != len(seconds):
                yield f"net.collectives: {measured.collective} lacks payloads or seconds"
            if any(a >= b for a, b in pairwise(sizes)) or sorted(seconds) != seconds:
                yield f"net.collectives: payloads and seconds of {measured.collective} do not rise"
    for one in words:
        known = [word.value for word in one.words]
        if one.value not in known:
            yield f"{one.where}: {one.value!r} is none of {', '.join(known)}"


def _damaged(faults: list[str], where: str) -> InputError:
    more = [f"and {len(faults) - _MOST_TOLD} more"] if len(faults) > _MOST_TOLD else []
    told = [f"damaged or changed by hand: {fault}" for fault in (*faults[:_MOST_TOLD], *more)]
    return gathered(told, where=where, fix=_AGAIN)


def _host(row: _Host) -> MeasuredHost:
    times = HostTimes(
        forward_seconds=row.dispatch_forward_seconds,
        backward_seconds=row.dispatch_backward_seconds,
        action_seconds=row.action_seconds,
        step_seconds=row.step_seconds,
        optimizer_tensor_seconds=row.optimizer_tensor_seconds,
        optimizer_element_seconds=row.optimizer_element_seconds,
        passes=PassTimes(**row.passes.model_dump()),
        unit=UnitTimes(**row.unit.model_dump()) if row.unit else None,
        pipeline=ActionTimes(**row.pipeline.model_dump()) if row.pipeline else None,
    )
    return MeasuredHost(device=row.device, threads=row.threads, torch=row.torch, times=times)


def _net(row: _Net) -> MeasuredNet:
    return MeasuredNet(
        device=row.device,
        backend=Backend(row.backend),
        ranks=row.ranks,
        torch=row.torch,
        alpha_seconds=row.alpha_seconds,
        bytes_per_second=row.bytes_per_second,
        collectives=tuple(
            MeasuredCollective(
                collective=one.collective,
                ranks=row.ranks,
                alpha_seconds=one.alpha_seconds,
                bytes_per_second=one.bytes_per_second,
                points=tuple(zip(one.payload_bytes, one.seconds, strict=True)),
                manner=Manner(one.manner),
            )
            for one in row.collectives
        ),
    )


def _op(row: _Op) -> MeasuredOp:
    key = OpKey(
        device=row.device,
        target=row.target,
        operands=tuple(map(_operand, row.operands)),
        arguments=tuple(row.arguments.items()),
        precision=Precision(row.precision),
    )
    timing = Timing(forward_seconds=row.forward_seconds, backward_seconds=row.backward_seconds)
    return MeasuredOp(key=key, timing=timing, samples=row.samples, torch=row.torch)


def _operand(text: str) -> Operand:
    match = _OPERAND.fullmatch(text)
    assert match is not None  # checked above
    shape = tuple(int(size) for size in match[2].split(", ") if size)
    return Operand(shape=shape, dtype=match[1], requires_grad=match[3] is not None)


def write_measurements(measured: MeasuredFile, path: Path) -> None:
    """Write measurements into a file."""
    text = measurements_text(measured, written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    write_whole(path, text, what="the measurements file")
