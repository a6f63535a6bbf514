"""Measured times that replace formulas; read from and written to measured.toml."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.planner.cluster.cluster import (
    Backend,
    Cluster,
    Link,
    LinkLevel,
    Machine,
    MeasuredCollective,
    Topology,
)
from autopar.planner.cluster.toml_reading import parsed
from autopar.planner.costs.ops.measurements import HostTimes, OpKey, Timing
from autopar.planner.errors import InputError
from autopar.planner.files import (
    Degree,
    Rate,
    SomeSeconds,
    check_format,
    damaged,
    is_written,
    read_given,
    validation_messages,
    write_whole,
)
from autopar.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOp:
    """The median time of an op on one device with one version of torch."""

    torch: str
    samples: Annotated[int, Ge(1)]
    timing: Timing
    key: OpKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHost:
    """The times that the host of a device adds, measured with `threads` threads of torch."""

    device: str
    threads: Degree
    torch: str
    times: HostTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNet:
    """The measured link between the devices of one machine."""

    device: str
    backend: Backend
    ranks: Annotated[Degree, Ge(2)]
    torch: str
    alpha_seconds: SomeSeconds  # of one hop, fitted to all collectives together
    bytes_per_second: Rate
    collectives: tuple[MeasuredCollective, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredFile:
    """The content of a measured.toml; times of the latest version of torch in it count."""

    hosts: tuple[MeasuredHost, ...] = ()
    nets: tuple[MeasuredNet, ...] = ()
    ops: tuple[MeasuredOp, ...] = ()

    def seconds(self, key: OpKey) -> Timing | None:
        """Return the timing of an op, or None if it was not measured."""
        return self._timings.get(key)

    def host(self, device: str) -> HostTimes | None:
        """Return the times that a device's host adds, or None if they were not measured."""
        return self._hosts.get(device)

    def on(self, cluster: Cluster) -> Cluster:
        """Return a cluster in which the links that were measured have the measured figures."""
        nets = {net.device: net for net in self.nets}
        nodes = tuple(
            replace(node, link=_link(node, nets[node.device.name]))
            if node.device.name in nets
            else node
            for node in cluster.nodes
        )
        if nodes == cluster.nodes:
            return cluster
        pairs = zip(cluster.nodes, nodes, strict=True)
        changed = [{old.link: new.link} for old, new in pairs for _ in range(old.devices)]
        levels = tuple(_relinked(level, changed) for level in cluster.levels)
        return replace(cluster, nodes=nodes, levels=levels)

    def merged(self, newer: MeasuredFile) -> MeasuredFile:
        """Return the measurements of both files; where both have one, the newer one counts."""
        for host in newer.hosts:
            self._check_threads(host)
        ops = {(one.key, one.torch): one for one in (*self.ops, *newer.ops)}
        hosts = {(one.device, one.torch): one for one in (*self.hosts, *newer.hosts)}
        nets = {one.device: one for one in (*self.nets, *newer.nets)}
        return MeasuredFile(
            ops=tuple(ops.values()), hosts=tuple(hosts.values()), nets=tuple(nets.values())
        )

    def _check_threads(self, newer: MeasuredHost) -> None:
        for host in self.hosts:
            if host.device == newer.device and host.threads != newer.threads:
                raise InputError(
                    f"{host.device} was measured with {host.threads} threads before, "
                    f"with {newer.threads} now",
                    fix="set OMP_NUM_THREADS as before, or write to another file with -o",
                )

    @cached_property
    def _timings(self) -> Mapping[OpKey, Timing]:
        return {
            one.key: one.timing for one in sorted(self.ops, key=lambda one: _version(one.torch))
        }

    @cached_property
    def _hosts(self) -> Mapping[str, HostTimes]:
        ordered = sorted(self.hosts, key=lambda one: _version(one.torch))
        return {one.device: one.times for one in ordered}


def _version(text: str) -> tuple[int, ...]:
    """Return a sort key of versions: "2.13.0+cpu" is (2, 13, 0)."""
    plain = text.partition("+")[0]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in plain.split("."))


def _link(node: Machine, net: MeasuredNet) -> Link:
    """Return the node's link with measured figures and an efficiency of 1."""
    return Link(
        name=f"{node.link.name} as measured",
        topology=Topology.SWITCH if net.backend.is_on_cpu else node.link.topology,
        bytes_per_second=net.bytes_per_second,
        alpha_seconds=net.alpha_seconds,
        efficiency=1.0,
        ports_per_device=node.link.ports_per_device,
        backend=net.backend,
        collectives=net.collectives,
    )


def _relinked(level: LinkLevel, changed: Sequence[Mapping[Link, Link]]) -> LinkLevel:
    """Return a level with measured links; `changed` maps the old link of each rank to the new."""
    firsts = accumulate((unit.ranks for unit in level.units), initial=0)
    units = (
        replace(unit, link=changed[first].get(unit.link, unit.link))
        for unit, first in zip(level.units, firsts, strict=False)
    )
    return replace(level, units=tuple(units))


FILE_NAME = "measured.toml"
FORMAT = 7
_HEADER = (
    "# These times replace autopar's formulas. Another run of `autopar profile` adds to this file "
    "and replaces what it measures again."
)
_EXPECTED = f"a {FILE_NAME} as `autopar profile` writes it"
_AGAIN = "measure again with `autopar profile`"


class _ProfileFile(BaseModel):
    """Applies pydantic's strictness to the dataclasses: no coercion, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    format: int
    autopar: str
    written: str
    measured: MeasuredFile


def read_measurements(path: Path) -> MeasuredFile:
    """Return the measurements in a file."""
    source = read_given(path, what="the measurements file", expected=_EXPECTED, fix=_AGAIN)
    return parse_measurements(source, where=str(path))


def parse_measurements(source: str, *, where: str) -> MeasuredFile:
    """Return the measurements in a text; `where` names it in messages."""
    table = dict(_table(source, where))
    envelope = {key: table.pop(key, None) for key in ("format", "autopar", "written")}
    try:
        text = json.dumps({**envelope, "measured": table}, default=lambda _: None)
        measured = _ProfileFile.model_validate_json(text).measured
    except ValidationError as error:
        raise _damaged(validation_messages(error), where) from None
    faults = list(_faults(measured))
    if faults:
        raise _damaged(faults, where)
    return measured


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
    if not is_written(table):
        raise InputError("this TOML file holds no measurements", where=where, expected=_EXPECTED)
    check_format(table, FORMAT, what="these measurements", where=where, fix=_AGAIN)
    return table


def _faults(measured: MeasuredFile) -> Iterator[str]:
    for one in (collective for net in measured.nets for collective in net.collectives):
        rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(one.points))
        if not one.points or not rises:
            yield f"nets.collectives: payloads and seconds of {one.collective} do not rise"


def _damaged(faults: list[str], where: str) -> InputError:
    return damaged(faults, what="the measurements were", where=where, fix=_AGAIN)


def write_measurements(measured: MeasuredFile, path: Path) -> None:
    """Write measurements into a file."""
    text = measurements_text(measured, written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    write_whole(path, text, what="the measurements file")


def content_hash(measured: MeasuredFile) -> str:
    """Return a hash of 64 hexadecimal digits that ignores the time of writing."""
    return hashlib.sha256(measurements_text(measured, written="").encode()).hexdigest()


def measurements_text(measured: MeasuredFile, *, written: str) -> str:
    """Return the text of measured.toml: a table per host, link and op."""
    file = _ProfileFile(format=FORMAT, autopar=__version__, written=written, measured=measured)
    values = file.model_dump(mode="json")
    sections = values.pop("measured")
    lines = [_HEADER, *(f"{key} = {_toml(value)}" for key, value in values.items())]
    for section, tables in sections.items():
        for table in tables:
            lines += ["", f"[[{section}]]"]
            lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Return a value in TOML; JSON's strings, numbers and booleans are valid TOML."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
