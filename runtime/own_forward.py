"""Finds the forward of a module that has one of its own beside that of its class."""

from __future__ import annotations

from torch import nn


def class_with_forward(module: nn.Module) -> type[nn.Module]:
    """Return a class whose forward is the module's, which may have been assigned to it alone.

    `self.forward = self.forward_train` in an __init__ would come before any class that the module
    takes. Here it goes into a class, and a subclass comes before it.
    """
    kind, own = type(module), module.__dict__.pop("forward", None)
    return kind if own is None else type(kind.__name__, (kind,), {"forward": staticmethod(own)})
