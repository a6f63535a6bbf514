"""Keeps the results of a training: the weights, and everything needed to resume it.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.checkpointing.keeper import Keeper

__all__ = ["Keeper"]
