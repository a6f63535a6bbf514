"""Computes every op of torch's own tests as scripts print it, and in every layout.

`python -m benchmarks.every_op [NAME]`, for ops whose names contain NAME. Each sample of an op is
traced as a small model in float32. Each op of its graph is computed as scripts print it, and then
in float64 on 2 and 3 simulated ranks in every layout that the planner has for it, with its
gradients. Needs the package `expecttest`, as torch's tests do.
"""

from __future__ import annotations

import argparse
import logging
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.field.op_trial import Finding, Kind, database, findings

RESULT = Path(__file__).parent / "results" / "every_op.md"
_MOST_SECONDS = 60  # for one op


def main(argv: Sequence[str] | None = None) -> None:
    """Try the ops one after another; write the page if all were tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="part of the names of ops")
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Sequence[Finding]] = {}
    for info in database(options.name):
        name = ".".join(filter(None, (info.name, info.variant_test_name)))
        found[name] = _tried(info)
        for one in _distinct(found[name]):
            print(f"{name:<40} {one.kind}: {one.detail[:200]}", flush=True)
    lines = "\n".join(page(found)) + "\n"
    if options.name:
        print(lines)
    else:
        RESULT.write_text(lines, encoding="utf-8")


def _tried(info: Any) -> Sequence[Finding]:
    """Return the findings of an op's samples, as many as are tried in _MOST_SECONDS."""
    found: list[Finding] = []
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(_MOST_SECONDS)
    try:
        found.extend(findings(info))
    except _OutOfTimeError:
        found.append(Finding(kind=Kind.LATE, detail=f"after {len(found)} samples"))
    finally:
        signal.alarm(0)
    return found


class _OutOfTimeError(BaseException):
    """Raised when an op's time is over; no Exception, which would count as a finding."""


def _out_of_time(*_: object) -> None:
    raise _OutOfTimeError


def _distinct(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield one finding of each kind except SAME."""
    yield from {one.kind: one for one in found if one.kind is not Kind.SAME}.values()


def page(found: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    """Yield the lines of the result."""
    tried = {name: own for name, own in found.items() if own}
    samples = Counter(one.kind for own in tried.values() for one in own)
    yield "# Every op of torch's own tests, as printed and as split\n"
    yield (
        f"Written by `benchmarks/every_op.py`: torch {torch.__version__}. Of {len(found)} ops, "
        f"{len(tried)} have samples that plain PyTorch trains, whose sizes do not depend on values "
        f"and which draw no random numbers: {sum(samples.values())} samples.\n"
    )
    yield "| what became of it | samples | ops |"
    yield "|---|--:|--:|"
    for kind in Kind:
        ops = sum(any(one.kind is kind for one in own) for own in tried.values())
        yield f"| {kind} | {samples[kind]} | {ops} |"
    for kind in (kind for kind in Kind if kind is not Kind.SAME):
        lines = [
            f"- {name} — {one.detail}"
            for name, own in tried.items()
            for one in _distinct(own)
            if one.kind is kind
        ]
        yield f"\n## {str(kind).capitalize()}\n"
        yield "\n".join(lines) or "None."


if __name__ == "__main__":
    main()
