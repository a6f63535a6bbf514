"""The only ways in which a value gets into a template: as a literal, an identifier, a remark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jinja2 import Environment, PackageLoader, StrictUndefined

from autopar.codegen.python_text import Source, identifier, literal, remark


def source(value: object) -> Source:
    """Let text through that this package made of literals and identifiers; refuse any other."""
    if not isinstance(value, Source):
        raise TypeError(f"{value!r} is no source text of ours")
    return value


FILTERS: Mapping[str, Callable[..., Source]] = MappingProxyType(
    {"literal": literal, "identifier": identifier, "remark": remark, "source": source}
)


def environment() -> Environment:
    """Return the templates' environment, which refuses what did not pass a filter."""
    made = Environment(
        loader=PackageLoader("autopar.codegen.script"),
        undefined=StrictUndefined,
        finalize=source,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters = dict(FILTERS)
    return made
