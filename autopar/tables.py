"""The look of all tables, and figures as people read them in one."""

from __future__ import annotations

from rich import box
from rich.table import Table

from autopar.planner.cluster.units import bytes_text, seconds_text

BAR_WIDTH = 24


def plain_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return a table with a title, its first `left` columns aligned to the left."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
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
