"""Tables on terminals of several widths."""

from __future__ import annotations

import io

from rich.console import Console

from autopar.pages.plan_page import bar, plain_table


def shown(width: int) -> list[str]:
    """Return the lines of a table with a bar and a long word, as a terminal shows them."""
    table = plain_table("Plans", "plan", "", "step", "tokens/s", "MFU", "memory", "bubble", left=2)
    table.add_row(
        "interleaved-zero-bubble", bar(0.5), "26.85 ms", "2.44 M", "26.9%", "9.043 GiB", "17%"
    )
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def test_a_row_stays_on_one_line_where_words_and_figures_have_room() -> None:
    for width in (120, 96):
        (*_, row) = shown(width)
        assert "interleaved-zero-bubble" in row
        assert "9.043 GiB" in row
        assert len(shown(width)) == 4


def test_a_wide_terminal_has_the_table_as_it_is_in_files() -> None:
    assert shown(120) == shown(200)
    assert max(map(len, shown(96))) <= 96
