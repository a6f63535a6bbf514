"""A text that is no TOML is told with its line, and with what to write."""

from __future__ import annotations

import pytest

from autopar.planner.cluster.toml_reading import parsed
from autopar.planner.errors import InputError


@pytest.mark.parametrize(
    ("source", "place", "fix"),
    [
        ("[pins]\ndp = = 2\n", "line 2, column 6: dp = = 2", "write key = value"),
        ("a = 1\nmemory = 70 GiB\n", "line 2, column 13: memory = 70 GiB", 'memory = "70 GiB"'),
        ("\tdevice = a100  # eight\n", "column 11: device = a100  # eight", ': device = "a100"'),
        ('device = "a100\n', 'line 1, column 15: device = "a100', "closed on the same line"),
        ("dp = 1\ndp = 2\n", "line 2, column 7: dp = 2", "leave one of the two out"),
        ("[pins]\n[pins]\n", "line 2, column 6: [pins]", "below one header"),
        ("dp: 2\n", "line 1, column 3: dp: 2", "key = value"),
        ("[pins\ndp = 2\n", "line 1, column 6: [pins", "close the bracket"),
        ("dp = [1,\n", "a.toml", "close the quote or bracket that is open"),
        ("a = " + "[" * 9999, "a.toml", ""),
    ],
)
def test_what_is_no_toml_is_told_with_its_line_and_what_to_write(
    source: str, place: str, fix: str
) -> None:
    with pytest.raises(InputError) as raised:
        parsed(source, where="a.toml")
    assert raised.value.where.startswith("a.toml")
    assert raised.value.where.endswith(place)
    assert fix in raised.value.fix
    assert "(at " not in raised.value.found.replace("(at end of document)", "")


def test_a_text_that_is_toml_is_a_table() -> None:
    assert parsed("[pins]\ndp = 2\n", where="a.toml") == {"pins": {"dp": 2}}
