"""What is told of a training that stands still; test_faults.py has real ones."""

from __future__ import annotations

from autopar.runtime.keeping.watch import place_of_main_thread, told_places


def test_who_says_nothing_comes_first_and_then_the_few() -> None:
    places = {0: "waits", 2: "waits", 3: "reads"}
    told = "rank 1 answers nothing, as one that is stopped; rank 3 reads; ranks 0, 2 waits"
    assert told_places(places, [1]) == told
    assert told_places({0: "waits"}, []) == "rank 0 waits"


def test_a_place_is_the_innermost_line_of_no_library() -> None:
    assert "in place_of_main_thread (watch.py, line " in place_of_main_thread()
