"""The loss of a model over the rows of a dataset that it is not trained on.

Scripts import from here; files import from each other.
"""

from autopar.runtime.evaluation.evaluating import Evaluation, one_by_one
from autopar.runtime.evaluation.row_metrics import Outputs
from autopar.runtime.evaluation.rows import read_evaluation

__all__ = ["Evaluation", "Outputs", "one_by_one", "read_evaluation"]
