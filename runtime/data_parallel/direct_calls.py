"""Hands on to the layers of `fully_shard` what its hooks would keep from them.

They gather parameters where a module is called, not where its forward is (`layer.forward(x)`), and
they give it new dicts and lists: what a layer writes there for others would be lost.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def run_hooks(module: nn.Module) -> None:
    """Have `module.forward(x)` do what `module(x)` does, with the containers that were given."""
    own, given = module.forward, list[Any]()  # what a call was given, once the hooks have run

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        given[:] = [(args, kwargs)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not given:
            return module(*args, **kwargs)
        first_args, first_kwargs = given.pop()
        args = _with_containers(first_args, args)
        kwargs = {key: _with_containers(first_kwargs.get(key), kwargs[key]) for key in kwargs}
        return own(*args, **kwargs)

    module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    module.forward = forward


def _with_containers(given: Any, handed: Any) -> Any:
    """Return what a layer is handed, in the dicts and lists that were given."""
    if type(given) is not type(handed) or given is handed:
        return handed
    if isinstance(given, dict):
        for key in given:
            given[key] = _with_containers(given[key], handed[key])
        return given
    if isinstance(given, list):
        given[:] = map(_with_containers, given, handed)
        return given
    if type(given) is tuple:
        return tuple(map(_with_containers, given, handed))
    return handed
