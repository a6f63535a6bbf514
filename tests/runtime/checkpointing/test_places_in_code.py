"""Where the main thread is, as it is told of a training that stands still."""

from __future__ import annotations

from autopar.runtime.checkpointing.watch import place_of_main_thread


def test_a_place_is_the_innermost_line_of_no_library() -> None:
    assert "in place_of_main_thread (watch.py, line " in place_of_main_thread()
