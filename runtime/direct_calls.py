"""Has the hooks of a module run where its forward is called by its name, as `layer.forward(x)`."""

from __future__ import annotations

from typing import Any

from torch import nn


def run_hooks(module: nn.Module) -> None:
    """Have `module.forward(x)` do what `module(x)` does: its hooks gather the parameters."""
    own, have_run = module.forward, False

    def note(*_: Any) -> None:
        nonlocal have_run
        have_run = True

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal have_run
        if not have_run:
            return module(*args, **kwargs)
        have_run = False
        return own(*args, **kwargs)

    module.register_forward_pre_hook(note)
    module.forward = forward
