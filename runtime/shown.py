"""Turns texts of others into what a terminal and a file may show: no orders, no passwords."""

from __future__ import annotations

import re

_HIDDEN = "***"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# The password of a URL, up to the last @ before a space or a quote: some have / and @ themselves.
# A number alone is a port.
_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*://[^\s:/@'\"]*:)(?!\d{1,5}(?:[/\s'\"]|$))[^\s'\"]+@")
_HTTP_TOKEN = re.compile(r"(\bhttps?://)[^\s:/@'\"]+@")
_SECRET_NAME = r"[\w.-]*(?:sig|signature|token|secret|passw(?:or)?d|pwd|credential|key)[\w.-]*"
_SECRET_VALUE = re.compile(rf"([?&;]{_SECRET_NAME}=)[^\s&'\"]+", re.IGNORECASE)
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)


def visible(text: str) -> str:
    """Return a text with all control characters spelled out, but for tabs and ends of lines."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def in_a_line(text: str) -> str:
    """Return a name of others as a part of one line: ends of lines and tabs are spelled out."""
    return visible(text.replace("\n", "\\n").replace("\t", "\\t"))


def masked(text: str) -> str:
    """Return a text with *** in the place of passwords and tokens in its URLs."""
    if "://" not in text:
        return text
    hidden = _PASSWORD.sub(rf"\1{_HIDDEN}@", text)
    hidden = _HTTP_TOKEN.sub(rf"\1{_HIDDEN}@", hidden)
    return _SECRET_VALUE.sub(rf"\1{_HIDDEN}", hidden)


def masked_variable(name: str, value: str) -> str:
    """Return the value of an environment variable as a file may show it."""
    return _HIDDEN if _SECRET.fullmatch(name) else masked(value)


def plain(text: str) -> str:
    """Return a text as a terminal may show it."""
    return masked(visible(text))
