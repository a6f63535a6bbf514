"""Plans cases in other processes, and runs their scripts; worlds of different sizes run at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import TypeVar

from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.cases import Case, Written, written

Result = TypeVar("Result")
_PLANNERS = 4


def in_lanes(
    context: Context, cases: Sequence[Case], run: Callable[[Written, str], Result]
) -> Iterator[tuple[Case, Result | Exception]]:
    """Yield what a function returns or raises for the script of each case, as soon as it does.

    The function also gets a folder. Cases with the same number of processes run one after the
    other, because there is one pool for each number.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="on-gpu-"))
        planners = ProcessPoolExecutor(
            1 if context.tiny else _PLANNERS, mp_context=get_context("spawn")
        )
        stack.callback(planners.shutdown, cancel_futures=True)
        lanes = {case.ranks: ThreadPoolExecutor(1) for case in cases}
        for lane in lanes.values():
            stack.callback(lane.shutdown, cancel_futures=True)
        running: dict[Future[Result], Case] = {}
        for number, case in enumerate(cases):
            planned = planners.submit(written, case, f"{folder}/{number}")
            running[lanes[case.ranks].submit(_run, run, planned, folder)] = case
        for one in as_completed(running):
            found = _found(one)
            yield running[one], found


def _run(run: Callable[[Written, str], Result], planned: Future[Written], folder: str) -> Result:
    return run(planned.result(), folder)


def _found(future: Future[Result]) -> Result | Exception:
    try:
        return future.result()
    except Exception as error:
        return error
