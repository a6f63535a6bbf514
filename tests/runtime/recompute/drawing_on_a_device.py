"""Prints from which states of a pretended device's generator a layer draws, and draws again."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.codegen.proof.pretended_device import (
    DEVICE,
    DeviceDrawRecorder,
    MadeOnDevice,
    PretendedDevice,
    pretend,
)
from autopar.runtime.recompute.running_again import recompute

MODES = ("selective", "full")
CALLS = ("position", "keyword", "nested", "nested keyword")


class Layer(nn.Module):
    """Attention that drops, as a GPU's kernel does, and a dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor | None = None, extras: Any = None) -> Tensor:
        x = extras["x"][0] if x is None else x
        q, k, v = (one.view(2, 4, 2, 8).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.1)[0]
        out: Tensor = x + F.dropout(self.out(y.transpose(1, 2).reshape(2, 4, 16)), 0.1)
        return out.sin()


def called(layer: nn.Module, x: Tensor, call: str) -> Tensor:
    """Give a layer its input in one of the ways of CALLS."""
    nested = {"x": [x]}
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "position": ((x,), {}),
        "keyword": ((), {"x": x}),
        "nested": ((None, nested), {}),
        "nested keyword": ((), {"extras": nested}),
    }
    positional, keywords = arguments[call]
    out: Tensor = layer(*positional, **keywords)
    return out


def states(mode: Any, call: str, device: PretendedDevice) -> list[tuple[str, str, bool]]:
    """Return the ops that draw in a forward and a backward, each with the generator's state."""
    with FakeTensorMode():
        torch.set_default_device(DEVICE)
        layer = Layer()
        torch.set_default_device(None)
        recompute(layer, mode)
        x = torch.ones(2, 4, 16, device=DEVICE, requires_grad=True)
        with DeviceDrawRecorder(device) as drawing:
            out = called(layer, x, call)
            device.draw()
            out.sum().backward()  # type: ignore[no-untyped-call]
    return [(draw.op, draw.state, draw.is_again) for draw in drawing.draws([layer])]


def main() -> None:
    """Print them for each mode and each call."""
    device = pretend()
    with MadeOnDevice():
        found = {mode: {call: states(mode, call, device) for call in CALLS} for mode in MODES}
    print(json.dumps(found), flush=True)
    os._exit(0)  # autograd has a thread for the device, and Python's exit can find it at work


if __name__ == "__main__":
    main()
