"""autopar plans how to split the training of a PyTorch model, and writes the script."""

from typing import TYPE_CHECKING, Any

from autopar.version import __version__

if TYPE_CHECKING:
    from autopar.api import AutoparError, Plan, load, plan

__all__ = ["AutoparError", "Plan", "__version__", "load", "plan"]


def __getattr__(name: str) -> Any:
    """Import the API on first use: a script that trains needs only the runtime."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autopar import api

    return getattr(api, name)
