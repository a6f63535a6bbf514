"""Reads rows of a dataset, and weights losses.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.data.batches import *
from autopar.runtime.data.loss import *
