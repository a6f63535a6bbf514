"""Averages gradients over the data axis, and shards parameters over it.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.data_parallel.wrapping import set_last, wrap

__all__ = ["set_last", "wrap"]
