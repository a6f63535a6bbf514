"""Tells by torch's flight recorder which messages this rank has begun, and which it waits for.

On a GPU the host runs ahead: the line where it waits is one that reads a number, whatever holds the
training up. What it has begun in each group, compared with other ranks, tells more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The message of this number in a group; all ranks of the group number theirs alike."""

    group: str
    number: int
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """What a rank has begun: by group the number of the last message, and what it waits for."""

    begun: Mapping[str, int]
    waits_for: Message | None = None  # the first that has not ended


def under_way() -> UnderWay:
    """Return what this rank has begun; nothing where torch has no recorder, or it is off."""
    with suppress(Exception):  # whatever is wrong with it, other things are to be told
        return _read(json.loads(_dumped()).get("entries", []))
    return UnderWay(begun={})


def _dumped() -> bytes:
    library: Any = torch._C._distributed_c10d
    is_nccl = dist.get_backend() == "nccl"
    dump = library._dump_nccl_trace_json if is_nccl else library._dump_fr_trace_json
    found: bytes = dump(includeCollectives=True)
    return found


def _read(entries: list[Mapping[str, Any]]) -> UnderWay:
    begun: dict[str, int] = {}
    waits_for: Message | None = None
    for one in entries:
        kind = "p2p" if one["is_p2p"] else "collective"
        name, described = one["process_group"]
        group, number = f"{name} {kind}", one[f"{kind}_seq_id"]
        begun[group] = max(begun.get(group, 0), number)
        if waits_for is None and not (one["retired"] or one["state"] == "completed"):
            told = f"{_op(one)} {number:,} of {_axis(described)}"
            waits_for = Message(group=group, number=number, told=told)
    return UnderWay(begun=begun, waits_for=waits_for)


def _op(entry: Mapping[str, Any]) -> str:
    """Return what torch calls an operation, without the library's name before it."""
    return str(entry["profiling_name"]).rpartition(":")[2]


def _axis(described: str) -> str:
    """Return which ranks a group has, by what it was made for."""
    if described.startswith("mesh_"):
        return f"the {described.removeprefix('mesh_')} axis"
    return "all ranks" if described == "default_pg" else f"group {described!r}"


def not_begun(ranks: Mapping[int, UnderWay]) -> Mapping[int, str]:
    """Return, of ranks that hold others up, what those wait for and these have not begun.

    A rank that waits for a message itself lags behind for that reason, unless all ranks wait.
    """
    waited = [one.waits_for for one in ranks.values() if one.waits_for is not None]
    idle = {rank: one for rank, one in ranks.items() if one.waits_for is None}
    found: dict[int, str] = {}
    for rank, own in (idle or ranks).items():
        for one in waited:
            if own.begun.get(one.group, one.number) < one.number:
                found.setdefault(rank, one.told)
    return found
