"""Makes texts safe to print: spells out control characters, and hides secrets."""

from __future__ import annotations

import re

HIDDEN = "***"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# The password of a URL, up to the last @ before a space or a quote, because passwords may contain /
# and @. A number without an @ is a port.
_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*://[^\s:/@'\"]*:)(?!\d{1,5}(?:[/\s'\"]|$))[^\s'\"]+@")
_HTTP_TOKEN = re.compile(r"(\bhttps?://)[^\s:/@'\"]+@")
_SECRET_NAME = r"[\w.-]*(?:sig|signature|token|secret|passw(?:or)?d|pwd|credential|key)[\w.-]*"
_SECRET_VALUE = re.compile(rf"([?&;]{_SECRET_NAME}=)[^\s&'\"]+", re.IGNORECASE)
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)


def visible(text: str) -> str:
    """Return a text with all control characters spelled out, except tabs and newlines."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def in_a_line(text: str) -> str:
    """Return a text for use inside a line: newlines and tabs are spelled out, too."""
    return visible(text.replace("\n", "\\n").replace("\t", "\\t"))


def masked(text: str) -> str:
    """Return a text with *** in place of passwords and tokens in URLs."""
    if "://" not in text:
        return text
    hidden = _PASSWORD.sub(rf"\1{HIDDEN}@", text)
    hidden = _HTTP_TOKEN.sub(rf"\1{HIDDEN}@", hidden)
    return _SECRET_VALUE.sub(rf"\1{HIDDEN}", hidden)


def masked_variable(name: str, value: str) -> str:
    """Return the value of an environment variable, without secrets."""
    return HIDDEN if _SECRET.fullmatch(name) else masked(value)


def plain(text: str) -> str:
    """Return a text that is safe to print: no control characters, no secrets."""
    return masked(visible(text))
