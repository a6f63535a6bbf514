"""Picks a configuration from a table of published sizes, and overrides some of its values."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

Config = TypeVar("Config")


def pick_size(sizes: Mapping[str, Config], size: str, **overrides: Any) -> Config:
    """Return the configuration called `size`, with every override that is not None."""
    if size not in sizes:
        raise ValueError(f"size {size!r} is unknown; there are: {', '.join(sizes)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    published: Any = sizes[size]  # a dataclass, which TypeVar cannot say
    chosen: Config = replace(published, **given)
    return chosen
