"""Keeps the results of a training: the weights, and everything needed to resume it.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.checkpointing.keeper import *
