"""Finds the line of a TOML text that a fault is about, so that a message can name it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.planner.errors import InputError

TOP = "the top of the file"
HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")


@contextmanager
def placed(source: str, *, where: str) -> Iterator[None]:
    """Have faults of a TOML text told with their lines; `where` names the text."""
    try:
        yield
    except InputError as error:
        line = line_of(source, error.where, error.found)
        own = error.where.removeprefix(f"{TOP}.")
        place = ", ".join(part for part in (where, line and f"line {line}", own) if part)
        raise InputError(error.found, where=place, expected=error.expected, fix=error.fix) from None


def line_of(source: str, where: str, found: str = "") -> int | None:
    """Return the line of a place such as "network.bandwidth" or "nodes 2.count"; None if unsure.

    The place names a section, the number of its occurrence, and at most one key in it. An unknown
    key is named only in the text of the fault, in quotes.
    """
    section, key = _split(where)
    numbered = re.fullmatch(r"(.*) (\d+)", section)
    name, number = (numbered[1], int(numbered[2])) if numbered else (section, 1)
    start = _section_start(source, name, number)
    if start is None:
        return None
    quoted = re.match(r"(?:- )?unknown key '([^']+)'", found)
    return _key_line(source, start, quoted[1] if quoted else key) or start or None


def _split(where: str) -> tuple[str, str]:
    """Return section and key: sections of devices and links have two parts, the others one."""
    parts = where.split(".")
    size = 2 if parts[0] in ("devices", "links") else 1
    return ".".join(parts[:size]), parts[size] if len(parts) > size else ""


def _section_start(source: str, name: str, number: int) -> int | None:
    """Return the line of the number-th header of a section; 0 is the top of the file."""
    if name in ("", TOP):
        return 0
    seen = 0
    for line, text in enumerate(source.splitlines(), start=1):
        header = HEADER.match(text)
        if header and header[1].replace('"', "") == name:
            seen += 1
            if seen == number:
                return line
    return None


def _key_line(source: str, start: int, key: str) -> int | None:
    """Return the line of a key after the header, before the next one; of a section from the top."""
    if not key:
        return None
    for line, text in enumerate(source.splitlines()[start:], start=start + 1):
        header = HEADER.match(text)
        if header and start:
            return None
        if re.match(rf"\s*\"?{re.escape(key)}\"?\s*[.=]", text) or (header and header[1] == key):
            return line
    return None
