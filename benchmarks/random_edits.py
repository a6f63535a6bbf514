"""Edits each kind of input file at random for a minute, and prints the edits that go wrong.

`python -m benchmarks.random_edits [SECONDS] [FILE…]`; exits with 1 if any edit went wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from tests.edited_files import KINDS, faults, kinds
from tests.random_edits import Edited

_FIRST_SEED = 1_000_000  # the test suite has smaller seeds


def main(argv: Sequence[str] | None = None) -> None:
    """Edit every kind of file, and print what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument("files", nargs="*", choices=[*KINDS, []], default=[])
    options = parser.parse_args(argv)
    chosen = [kinds()[name] for name in options.files or KINDS]
    sys.exit(int(sum(_tried(kind, options.seconds) for kind in chosen) > 0))


def _tried(kind: Edited, seconds: float) -> int:
    """Return how many edits of a kind of file went wrong."""
    seeds = list[int]()

    def until(end: float) -> Iterator[int]:
        while time.monotonic() < end:
            seeds.append(_FIRST_SEED + len(seeds))
            yield seeds[-1]

    wrong = 0
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        for fault in faults(kind, Path(folder), until(time.monotonic() + seconds)):
            wrong += 1
            print(fault, flush=True)
    print(f"{kind.name:<20} {len(seeds):>6} edits, {wrong} wrong", flush=True)
    return wrong


if __name__ == "__main__":
    main()
