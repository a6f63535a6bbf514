"""Reads and sets the states of the generators that ops of this process draw from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

States: TypeAlias = Sequence[Tensor]


def generator_states() -> States:
    """Return the states of the CPU's generator and, if a GPU is in use, of that GPU's."""
    device = _device_in_use()
    cpu = torch.get_rng_state()
    return (cpu,) if device is None else (cpu, device.get_rng_state())


def set_generator_states(states: States) -> None:
    """Set the generators to states that `generator_states` returned."""
    cpu, *others = states
    torch.set_rng_state(cpu)
    for state in others:
        device = _device_in_use()
        assert device is not None
        device.set_rng_state(state)


def _device_in_use() -> Any | None:
    """Return torch's module for the accelerator (torch.cuda), if this process has begun to use it.

    To ask a GPU for its generator's state would begin to use it.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    has_begun = getattr(module, "is_initialized", None)
    return module if has_begun is None or has_begun() else None
