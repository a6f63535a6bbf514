"""A pretended device, and the random numbers drawn on it.

Tensors seem to be on it and hold no values. As on a GPU, an op that mixes its tensors with the
CPU's raises, and random numbers come from the device's own generator. Its ops run only under
FakeTensorMode.

The device shows whether recomputed layers draw the same numbers. Training on CPUs does not show
this, because torch saves the CPU's generator in other cases than a GPU's. `python -m
autopar.codegen.proof.pretended_device SCRIPT RANK/WORLD …` prints a JSON list of sentences on
layers that draw other numbers when recomputed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._meta_registrations import calc_conv_nd_return_shape
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from autopar.codegen.proof.draws import DrawRecorder, NotedDraw, recompute_draw_faults, settings_of
from autopar.codegen.proof.dryrun.watching import FirstStep, run_first_step, sizes_from_data
from autopar.runtime.ranks import mesh
from autopar.runtime.tensor.shards import put_into

NAME = "pretended"
DEVICE = f"{NAME}:0"


class _Event:
    """An event of a stream, already reached."""

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None:
        return None

    synchronize = wait


class _Stream(_Event):
    """A stream that is always empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    wait_event = wait_stream = _Event.wait

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def is_capturing(self) -> bool:
        return False


class PretendedDevice(_DummyBackendModule):
    """What torch.cuda is for GPUs; an op that would draw numbers changes its generator's seed."""

    Stream, Event = _Stream, _Event
    _initialized = True  # read by torch.utils.checkpoint

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
        """Return the dtypes that autocast may cast to."""
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator; called by torch.manual_seed."""
        self.generator.manual_seed(seed)

    def draw(self) -> int:
        """Advance the generator, and return a number for its previous state."""
        before = self.generator.initial_seed()
        self.generator.manual_seed((before + 1) % 2**63)
        return before

    def get_rng_state(self, *_: Any) -> Tensor:
        """Return the state of the generator."""
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        """Set the state of the generator."""
        self.generator.set_state(state)


def _moved(tensor: Any, source: Any) -> None:
    gradient = tensor.grad_dtype
    put_into(tensor, source)
    tensor.grad_dtype, tensor.fake_device = gradient, source.fake_device


_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__


class MadeOnDevice(TorchFunctionMode):
    """A mode that handles calls which no dispatch mode sees."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function."""
        named = dict(kwargs or {})
        is_there = torch.device(named.get("device") or "cpu").type == NAME
        if func is torch.tensor and is_there:
            return func(*args, **{**named, "device": "cpu"}).to(named["device"])
        if func == _SET_DATA and args[0].device != args[1].device:  # GPUs allow it
            return _moved(*args)
        if is_there and detect_fake_mode() is None:  # placeholders of fully_shard
            return func(*args, **{**named, "device": "meta"})
        return func(*args, **named)


def _convolved(_: FakeTensorMode, __: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return a convolution's result; torch has no kernel for an unknown device."""
    _bias, stride, padding, dilation, transposed, output_padding, groups = rest
    options = (stride, padding, dilation, transposed, groups, output_padding)
    return x.new_empty(calc_conv_nd_return_shape(x, weight, *options))


def _convolved_backward(
    _: FakeTensorMode, __: Any, gradient: Tensor, x: Tensor, weight: Tensor, *___: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the weight and a bias."""
    return torch.empty_like(x), torch.empty_like(weight), gradient.new_empty(gradient.shape[1])


def pretend() -> PretendedDevice:
    """Register the device with torch, for this process and its forks."""
    device = PretendedDevice()
    _setup_privateuseone_for_python_backend(NAME, backend_module=device)
    torch.accelerator.current_stream = _Stream  # type: ignore[assignment]
    # torch 2.15 does this in C++, which does not know this device's streams
    vars(_fsdp_collectives)["record_grad_output_stream"] = lambda *_: None
    dist.Backend.backend_capability["fake"].append(NAME)
    register_op_impl(_ATEN.convolution_overrideable.default)(_convolved)
    register_op_impl(_ATEN.convolution_backward_overrideable.default)(_convolved_backward)
    mesh._device = lambda: torch.device(DEVICE)
    with FakeTensorMode():
        torch.ones(2).exp()  # loads libraries once, before forks; must not be a backward
    return device


_ATEN = torch.ops.aten
_attention = functional.scaled_dot_product_attention


class DeviceDrawRecorder(DrawRecorder):  # type: ignore[no-untyped-call]
    """Records every op that draws numbers on the pretended device."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__(unseeded=-1)
        self.device = device

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        made = func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and "backward" not in func.name()
        if draws and kwargs.get("generator") is None:
            first = made[0] if isinstance(made, (tuple, list)) else made
            if isinstance(first, Tensor) and first.device.type == NAME:
                settings = settings_of(func, args, kwargs)
                self._note(func, settings, made, str(self.device.draw()), is_seeded=True)
        return made


def device_draw_faults(script: Path, ranks: Sequence[int], world: int) -> tuple[str, ...]:
    """Return a sentence for each layer of a script that draws other numbers when recomputed."""
    words = [f"{rank}/{world}" for rank in ranks]
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(script), *words],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return tuple(found)


def draws_of(path: Path, device: PretendedDevice) -> tuple[NotedDraw, ...]:
    """Run a script's `main` to the end of its first step, and return its draws."""
    found: list[NotedDraw] = []

    def watched(step: FirstStep, _: None) -> None:
        fused = patch.object(functional, "scaled_dot_product_attention", _fused)
        with fused, DeviceDrawRecorder(device) as drawing:
            step.take()
        found.extend(drawing.draws(step.parts))

    run_first_step(path, _without_values(), watched)
    return tuple(found)


@contextmanager
def _without_values() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), sizes_from_data():
        yield


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of attention; with dropout it is a single random op, as on GPUs."""
    if not dropout_p or query.dim() != 4:
        return _attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    out: Tensor = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return out


def main(script: str, *ranks: str) -> None:
    """Print a JSON list: a sentence on each layer that draws other numbers when recomputed."""
    device = pretend()
    found: dict[str, None] = {}
    for rank in ranks:
        here, there = get_context("fork").Pipe(duplex=False)
        running = get_context("fork").Process(
            target=_send_faults, args=(script, rank, device, there)
        )
        running.start()
        there.close()
        try:
            found |= dict.fromkeys(here.recv())
        except EOFError:
            running.join()
            sys.exit(f"rank {rank} failed")
        running.join()
    print(json.dumps(list(found)))


def _send_faults(script: str, rank: str, device: PretendedDevice, to: Connection) -> None:
    os.environ[mesh.DRY_RUN] = rank
    with MadeOnDevice():
        to.send(list(recompute_draw_faults([draws_of(Path(script), device)])))


if __name__ == "__main__":
    main(*sys.argv[1:])
