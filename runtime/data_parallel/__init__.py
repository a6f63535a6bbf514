"""Averages gradients over the data axis, and shards parameters over it.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.data_parallel.wrapping import *
