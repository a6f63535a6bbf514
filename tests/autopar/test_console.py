"""What others wrote is printed as it is: no markup, no orders to the terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.table import Table
from rich.text import Text

from autopar.console import PlainConsole, status_line
from autopar.runtime.texts import visible

HOSTILE = "a[/red]b\x1b[2Jc\x00d\x9be :smile: \u202ef"
SHOWN = r"a[/red]b\x1b[2Jc\x00d\x9be :smile: \u202ef"


def printed(*given: object) -> str:
    """What appears on a terminal with colours."""
    page = io.StringIO()
    PlainConsole(file=page, force_terminal=True, width=200).print(*given)
    return page.getvalue()


def test_control_characters_are_spelled_out_but_for_tabs_and_ends_of_lines() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("one\n\ttwo × 3") == "one\n\ttwo × 3"


@pytest.mark.parametrize("given", [HOSTILE, Text(HOSTILE), Text.assemble((HOSTILE, ""))])
def test_a_hostile_name_is_printed_as_it_is(given: object) -> None:
    assert printed(given) == f"{SHOWN}\n"


def test_a_hostile_name_in_a_table_is_printed_as_it_is() -> None:
    table = Table("name")
    table.add_row(HOSTILE)
    page = printed(table)
    assert SHOWN in page
    assert "\x1b[2J" not in page


def test_colours_of_our_own_stay() -> None:
    assert "\x1b[1m" in printed(Text("bold", style="bold"))


@pytest.mark.parametrize(("takes", "shown"), [(0.0, False), (0.5, True)])
def test_a_terminal_shows_what_is_being_done_where_that_takes_long(
    takes: float, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with status_line("searching", after_seconds=0.1) as report:
        report("solving dp 8")
        time.sleep(takes)
    told = capsys.readouterr()
    assert ("solving dp 8" in told.err, told.out) == (shown, "")


def test_elsewhere_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with status_line("searching", after_seconds=0.0) as report:
        report("solving dp 8")
    assert capsys.readouterr().err == ""
