"""Turns a trace of steps into seconds by kind of kernel, and the time in which the GPU was idle."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_TRACED_STEPS = 3
_MOST_KERNELS = 30
_MOST_LETTERS = 160
# A kernel is of the first kind whose pattern occurs in its name.
_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("attention", r"flash|fmha|attention|sdpa|softmax_warp"),
        ("convolution", r"fprop|dgrad|wgrad|conv|implicit|winograd|nchwToNhwc|nhwcToNchw"),
        ("matrix product", r"gemm|nvjet|cutlass|wgmma|splitk|gemv|cublas|matmul"),
        ("optimizer, clipping and copies of all weights", r"multi_tensor|adam|lpnorm|FusedSgd"),
        ("norm", r"layer_?norm|rms_?norm|batch_?norm|\bbn_|GammaBeta|RowwiseMoments|NormBackward"),
        ("softmax, cross entropy", r"softmax|nll_loss|cross_entropy"),
        ("compiled by inductor", r"^triton"),
        ("look-up", r"embedding|indexSelect|index_|gather|scatter|sort"),
        ("copies and casts", r"copy|memcpy|memset|CatArray|fill"),
        ("reduction", r"reduce"),
        ("elementwise", r"elementwise|vectorized|unrolled"),
    )
)
_COMMON = re.compile(r"void |at::(native::)?|\(anonymous namespace\)::|std::|c10::|<unnamed>::")
OTHER, IDLE = "others", "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the GPU did in one step."""

    seconds: Mapping[str, float]  # by kind, and idle
    launched: float
    largest: tuple[tuple[str, float, float], ...]  # a kernel's name, seconds and calls of a step


def kernels_of(step: Callable[[], object]) -> Kernels:
    """Trace a few steps, and return what the GPU did in one, on average."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as tracer:
        for _ in range(_TRACED_STEPS):
            step()
        torch.cuda.synchronize()
    spans = [
        (one.time_range.start, one.time_range.end, one.name)
        for one in tracer.events() or ()
        if one.device_type == torch._C._autograd.DeviceType.CUDA and not _is_remark(one)
    ]
    return summed(spans, steps=_TRACED_STEPS)


def _is_remark(event: Any) -> bool:
    """Whether an event is no kernel, but spans the kernels that a piece of code has launched."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith("Optimizer.")


def summed(spans: Sequence[tuple[float, float, str]], *, steps: int) -> Kernels:
    """Sum kernels that began and ended at these microseconds."""
    by_kind, by_name = defaultdict[str, float](float), defaultdict[str, float](float)
    calls = Counter[str]()
    for begin, end, name in spans:
        by_kind[kind_of(name)] += end - begin
        by_name[name] += end - begin
        calls[name] += 1
    by_kind[IDLE] = _idle(spans)
    largest = tuple(
        (name, microseconds / 1e6 / steps, calls[name] / steps)
        for name, microseconds in _most_first(by_name)[:_MOST_KERNELS]
    )
    return Kernels(
        seconds={kind: one / 1e6 / steps for kind, one in _most_first(by_kind)},
        launched=len(spans) / steps,
        largest=largest,
    )


def _most_first(sums: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(sums.items(), key=lambda one: -one[1])


def kind_of(name: str) -> str:
    """Return the kind of a kernel with this name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OTHER)


def short(name: str) -> str:
    """Return a kernel's name without what most names have in common."""
    return _COMMON.sub("", name)[:_MOST_LETTERS]


def _idle(spans: Sequence[tuple[float, float, str]]) -> float:
    """Return the microseconds between the first kernel and the last in which none ran."""
    idle, busy_until = 0.0, None
    for begin, end, _ in sorted(spans):
        if busy_until is not None and begin > busy_until:
            idle += begin - busy_until
        busy_until = end if busy_until is None else max(busy_until, end)
    return idle
