"""Makes a device that is not there: tensors say that they lie on it, and hold no values.

As on a GPU, an op over tensors there and on the CPU raises, and random numbers come from a
generator of the device's own. Ops on it run under FakeTensorMode alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
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
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from autopar.runtime.ranks import mesh

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


class PretendedDevice(_DummyBackendModule):
    """What torch asks a kind of device for, by the name of its module (as torch.cuda).

    Nothing is drawn from its generator: it goes from seed to seed with each op that would draw.
    """

    Stream, Event = _Stream, _Event
    _initialized = True  # which torch.utils.checkpoint looks at

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def current_stream(self, *_: Any) -> _Stream:
        """Return the one stream."""
        return _Stream()

    def stream(self, _: _Stream) -> AbstractContextManager[None]:
        """Make a stream the current one."""
        return nullcontext()

    def device(self, _: Any) -> AbstractContextManager[None]:
        """Make a device the current one."""
        return nullcontext()

    def set_device(self, _: Any) -> None:
        """Make a device the current one from here on."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that autocast may cast to."""
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator; torch.manual_seed does so."""
        self.generator.manual_seed(seed)

    def draw(self) -> int:
        """Move the generator on, and return a number that tells where it was."""
        before = self.generator.initial_seed()
        self.generator.manual_seed((before + 1) % 2**63)
        return before

    def get_rng_state(self, *_: Any) -> Tensor:
        """Return the state of the generator."""
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        """Set the state of the generator."""
        self.generator.set_state(state)


class Made(TorchFunctionMode):
    """Makes tensors on the device that no mode for ops would see, or none is there to see."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
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


def pretend() -> PretendedDevice:
    """Have this process and those forked from it believe that it has such a device."""
    device = PretendedDevice()
    _setup_privateuseone_for_python_backend(NAME, backend_module=device)
    torch.accelerator.current_stream = _Stream  # type: ignore[assignment]
    vars(_fsdp_collectives)["record_grad_output_stream"] = lambda *_: None  # in C, of torch 2.15
    dist.Backend.backend_capability["fake"].append(NAME)
    mesh._device = lambda: torch.device(DEVICE)
    with FakeTensorMode():
        torch.ones(2).exp()  # loads what each process would load again; no backward before a fork
    return device
