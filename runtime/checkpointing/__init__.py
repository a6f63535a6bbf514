"""What stays of a training: its weights, and all that it takes to go on.

Scripts import from here; files import from each other.
"""

from autopar.runtime.checkpointing.keeper import Keeper

__all__ = ["Keeper"]
