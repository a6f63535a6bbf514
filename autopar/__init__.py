"""autopar plans how to split the training of a PyTorch model, and writes the script."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import AutoparError, Plan, load, plan

__version__ = "0.2.0"
__all__ = ["AutoparError", "Plan", "load", "plan"]


def __getattr__(name: str) -> Any:
    """Import the API when it is asked for: a script that trains needs the runtime alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autopar import api

    return getattr(api, name)
