"""Reads rows of a dataset, and weights losses.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.data.batches import *
from autopar.runtime.data.loss import *
