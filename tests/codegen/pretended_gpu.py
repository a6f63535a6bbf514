"""Dry-runs ranks of scripts on a device that is not there: `python -m … SCRIPT RANK/WORLD …`.

Tensors say that they lie on it and hold no values. As on a GPU, an op over tensors there and on the
CPU raises, and so does a message that nccl would refuse, which a dry run on the CPU would not show.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._meta_registrations import calc_conv_nd_return_shape
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from autopar.codegen.proof.dryrun import watching
from autopar.codegen.proof.dryrun.rank import report_of
from autopar.codegen.proof.dryrun.watching import Recording
from autopar.runtime import pipeline  # noqa: F401  loaded once for all processes
from autopar.runtime.ranks import mesh
from tests.strict.refusals import refuse

NAME = "pretended"
DEVICE = f"{NAME}:0"


class _Event:
    """A mark in a stream, which is passed at once."""

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None:
        return None

    synchronize = wait


class _Stream(_Event):
    """A queue of work that is always empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    wait_event = wait_stream = _Event.wait

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def is_capturing(self) -> bool:
        return False


class _Device(_DummyBackendModule):
    """What torch asks a kind of device for, by the name of its module."""

    Stream, Event = _Stream, _Event

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    def stream(self, _: _Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, _: Any) -> None:
        return None

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.empty(0)

    def set_rng_state(self, *_: Any) -> None:
        return None


class _Made(TorchFunctionMode):
    """Makes tensors on the device that no mode for ops would see, or none is there to see."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        is_there = torch.device(named.get("device") or "cpu").type == NAME
        if func is torch.tensor and is_there:  # no op
            return func(*args, **{**named, "device": "cpu"}).to(named["device"])
        if is_there and detect_fake_mode() is None:  # placeholders of fully_shard
            return func(*args, **{**named, "device": "meta"})
        return func(*args, **named)


@register_op_impl(torch.ops.aten.convolution_overrideable.default)
def _convolved(_: FakeTensorMode, __: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return what a convolution gives, of which a device unknown to torch has no kernel."""
    _bias, stride, padding, dilation, transposed, output_padding, groups = rest
    options = (stride, padding, dilation, transposed, groups, output_padding)
    return x.new_empty(calc_conv_nd_return_shape(x, weight, *options))


@register_op_impl(torch.ops.aten.convolution_backward_overrideable.default)
def _convolved_backward(
    _: FakeTensorMode, __: Any, gradient: Tensor, x: Tensor, weight: Tensor, *___: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the weight and a bias."""
    return torch.empty_like(x), torch.empty_like(weight), gradient.new_empty(gradient.shape[1])


class _Refusing(Recording):  # type: ignore[no-untyped-call]
    """Refuses messages that nccl refuses."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor):
                    refuse(func.name(), one, NAME)
        return super().__torch_dispatch__(func, types, args, kwargs)


def main(jobs: Sequence[str]) -> None:
    """Print a report for each script and rank, each from a process that has met no other."""
    vars(watching)["Recording"] = _Refusing
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
    torch.accelerator.current_stream = _Stream  # type: ignore[assignment]
    vars(_fsdp_collectives)["record_grad_output_stream"] = lambda *_: None  # in C, of torch 2.15
    dist.Backend.backend_capability["fake"].append(NAME)
    mesh._device = lambda: torch.device(DEVICE)
    with FakeTensorMode():
        torch.ones(2).exp()  # loads what each process would load again; no backward before a fork
    for path, rank in zip(jobs[::2], jobs[1::2], strict=True):
        running = get_context("fork").Process(target=_dry_run, args=(path, rank))
        running.start()
        running.join()
        if running.exitcode:
            sys.exit(f"rank {rank} of {path} failed")


def _dry_run(path: str, rank: str) -> None:
    os.environ[mesh.DRY_RUN] = rank
    with _Made():
        print(report_of(Path(path)).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
