"""Gradients over the data axis, and the parameters that its ranks share.

Scripts import from here; files import from each other.
"""

from autopar.runtime.data_parallel.wrapping import set_last, wrap

__all__ = ["set_last", "wrap"]
