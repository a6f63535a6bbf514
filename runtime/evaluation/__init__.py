"""Computes the loss of a model over the rows of an evaluation dataset.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.evaluation.evaluating import Evaluation, one_by_one, with_gradients
from autopar.runtime.evaluation.first_step import PlainModel, check_first_step
from autopar.runtime.evaluation.metrics import Absent, Outputs, named_outputs
from autopar.runtime.evaluation.rows import read_evaluation

__all__ = [
    "Absent",
    "Evaluation",
    "Outputs",
    "PlainModel",
    "check_first_step",
    "named_outputs",
    "one_by_one",
    "read_evaluation",
    "with_gradients",
]
