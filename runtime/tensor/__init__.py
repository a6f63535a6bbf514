"""Handles tensors split over ranks: finds each rank's part, and exchanges parts.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.tensor.chunked_logits import *
from autopar.runtime.tensor.collectives import *
from autopar.runtime.tensor.shards import *
from autopar.runtime.tensor.vocabulary import *
