"""Keeps the classes and attributes of parameters where `fully_shard` puts others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autopar.runtime.tensor.contents import is_marked, made_like


@contextmanager
def carried_marks(model: nn.Module) -> Iterator[None]:
    """Give what takes the place of parameters in the body their classes and attributes.

    Those that are sharded get them at once, for the optimizer; those that are gathered for a
    forward get them before it.
    """
    marked = {module: _marked(module) for module in model.modules()}
    yield
    for module, originals in marked.items():
        if originals:
            _carry(module, originals)
            module.register_forward_pre_hook(_Carrying(originals))


def _marked(module: nn.Module) -> dict[str, Tensor]:
    parameters = module._parameters.items()
    return {name: one for name, one in parameters if one is not None and is_marked(one)}


class _Carrying:
    """A hook that runs before a forward."""

    def __init__(self, originals: Mapping[str, Tensor]) -> None:
        self._originals = originals

    def __call__(self, module: nn.Module, _: Any) -> None:
        _carry(module, self._originals)


def _carry(module: nn.Module, originals: Mapping[str, Tensor]) -> None:
    for name, original in originals.items():
        parameter = module._parameters.get(name)
        if parameter is not None and not getattr(parameter, _CARRIES, False):
            setattr(made_like(parameter, original), _CARRIES, True)


_CARRIES = "_autopar_carries"  # marks a parameter that has them
