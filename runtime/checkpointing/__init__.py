"""Keeps the results of a training: the weights, and everything needed to resume it.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.checkpointing.keeper import *
