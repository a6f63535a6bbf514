"""Computes the loss of a model over the rows of an evaluation dataset.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.evaluation.evaluating import *
from autopar.runtime.evaluation.first_step import *
from autopar.runtime.evaluation.metrics import *
from autopar.runtime.evaluation.rows import *
