"""What remains of a training: the weights, and everything needed to resume it.

Scripts import from here; files import from each other.
"""

from autopar.runtime.checkpointing.keeper import Keeper

__all__ = ["Keeper"]
