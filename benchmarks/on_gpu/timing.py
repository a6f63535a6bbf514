"""Times a function on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_ASLEEP_CYCLES = 30_000_000  # some 16 ms


def median_seconds(
    function: Callable[[], Any], device: str, *, samples: int = 15, warm_up: int = 3
) -> float:
    """Return the median time of a call; on a GPU, by the GPU's own clock.

    Calls are queued while the GPU sleeps, so that gaps between kernels that a slow host would leave
    are not counted.
    """
    for _ in range(warm_up):
        function()
    if device != "cuda":
        return median(_host_seconds(function) for _ in range(min(samples, 3)))
    event: Any = torch.cuda.Event
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(samples)]
    torch.cuda.synchronize()
    torch.cuda._sleep(_ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
    for begin, end in pairs:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3


def _host_seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
