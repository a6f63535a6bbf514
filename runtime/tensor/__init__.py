"""Handles tensors split over ranks: finds each rank's part, and exchanges parts.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.tensor.chunked_logits import *
from autopar.runtime.tensor.collectives import *
from autopar.runtime.tensor.shards import *
from autopar.runtime.tensor.vocabulary import *
