"""Has the hooks of a module run where its forward is called by its name, as `layer.forward(x)`."""

from __future__ import annotations

from typing import Any

from torch import nn


def run_hooks(module: nn.Module) -> None:
    """Have `module.forward(x)` do what `module(x)` does: its hooks gather the parameters."""
    own, ahead = module.forward, list[bool]()  # whether the hooks have run: one call, or none

    def hooks_run(*_: Any) -> None:
        ahead[:] = [True]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not ahead:
            return module(*args, **kwargs)
        ahead.clear()
        return own(*args, **kwargs)

    module.register_forward_pre_hook(hooks_run)
    module.forward = forward
