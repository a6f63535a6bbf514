"""Averages gradients over the data axis, and shards parameters over it.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.data_parallel.wrapping import *
