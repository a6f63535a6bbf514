"""The look of all tables, and figures as people read them in one."""

from __future__ import annotations

from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.planner.cluster.units import bytes_text, seconds_text

BAR_WIDTH = 24
_WIDE = 100  # characters; a narrower terminal needs them for the words


class _FittingTable(Table):
    """A table that stands close together where the terminal is narrow."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < _WIDE:
            self.padding, self.pad_edge, self.show_edge = (0, 1, 0, 0), False, False
        yield from super().__rich_console__(console, options)
        if not self.show_edge:
            yield Text()  # as an edge below would be


def plain_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return a table with a title, its first `left` columns aligned to the left.

    A bar, which has no heading, is cut off where there is no room for it.
    """
    table = _FittingTable(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for i, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if i < left else "right"
        is_bar = i > 0 and not column
        overflow: Literal["crop", "fold"] = "crop" if is_bar else "fold"
        table.add_column(column, justify=side, overflow=overflow, no_wrap=is_bar)
    return table


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Return a share as a bar; what is over the full width ends in a mark."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled) + ("!" if share > 1 else "")


def rate_text(per_second: float) -> str:
    """Return a rate as people read it: 12.4 k, 3.1 M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.3g} {letter}"
    return f"{per_second:.3g}"


def figure_text(value: float, unit: str) -> str:
    """Return a figure in the unit that it is in: seconds, bytes, per second, money or a share."""
    if unit == "s":
        return seconds_text(value) if value else "0"
    if unit == "B":
        return bytes_text(value)
    if unit == "USD":
        return f"{value:.3g} USD"
    return rate_text(value) if unit == "1/s" else f"{value:.1%}"
