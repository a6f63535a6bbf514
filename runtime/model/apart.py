"""Lets a layer write into what it is given where that has to stay as it was."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autopar.runtime.model.own_forward import class_with_forward


def keep_apart(module: nn.Module) -> None:
    """Have a module (a layer) work on copies of the tensors that it is given, and return no views.

    A forward that runs again wants its inputs as they were, and what fully_shard hands to a module
    must not be written to; where others write to a view of a result, its hooks are lost. The
    instance takes a subclass of its class: parameters, buffers and names stay as they are.
    """
    kind = class_with_forward(module)
    module.__class__ = type(f"Apart{kind.__name__}", (_Apart, kind), {})


class _Apart(nn.Module):
    """A module whose tensors nobody else writes to, nor it to those of others."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the module's class does."""
        args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        return tree_map_only(Tensor, _owned, super().forward(*args, **kwargs))


def _owned(result: Tensor) -> Tensor:
    return result.clone() if result._is_view() else result
