"""Computes the loss of a model over the rows of an evaluation dataset.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.evaluation.evaluating import *
from autopar.runtime.evaluation.first_step import *
from autopar.runtime.evaluation.metrics import *
from autopar.runtime.evaluation.rows import *
