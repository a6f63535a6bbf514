"""Refuses files that autopar wrote in another format, and tells what was changed in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from autopar.planner.errors import InputError

_MOST_TOLD = 5


def is_written(table: object) -> bool:
    """Whether a table is one that autopar wrote: it says in which format, and by which version."""
    return isinstance(table, dict) and type(table.get("format")) is int and "autopar" in table


def check_format(table: Mapping[str, Any], known: int, *, what: str, where: str, fix: str) -> None:
    """Refuse what an older or a newer autopar wrote in another format."""
    number = table["format"]
    if number != known:
        newer = "update autopar, or " if number > known else ""
        raise InputError(
            f"autopar {table['autopar']} wrote {what} in format {number}",
            where=where,
            expected=f"format {known}, of this autopar",
            fix=newer + fix,
        )


def told(error: ValidationError) -> list[str]:
    """Return what pydantic found: the place behind the outermost field, what should stand there."""
    return [
        f"{'.'.join(str(part) for part in one['loc'][1:] or one['loc'])}: {one['msg']}"
        for one in error.errors(include_url=False, include_input=False)
    ]


def damaged(faults: Sequence[str], *, what: str, where: str, fix: str) -> InputError:
    """Return one error for all faults of a file, the first few of them told."""
    more = [f"and {len(faults) - _MOST_TOLD} more"] if len(faults) > _MOST_TOLD else []
    lines = "".join(f"\n- {fault}" for fault in (*faults[:_MOST_TOLD], *more))
    return InputError(f"{what} damaged or changed by hand:{lines}", where=where, fix=fix)
