"""Rows of a dataset, and the weight of each loss.

Scripts import from here; files import from each other.
"""

from autopar.runtime.data.batches import (
    Batch,
    gathered_rows,
    placed,
    read_batches,
)
from autopar.runtime.data.loss import (
    Weighed,
    in_float32,
    loss_in,
    mean_loss,
    scale_loss,
    weighed_ahead,
    weighed_terms_ahead,
    with_plain,
)

__all__ = [
    "Batch",
    "Weighed",
    "gathered_rows",
    "in_float32",
    "loss_in",
    "mean_loss",
    "placed",
    "read_batches",
    "scale_loss",
    "weighed_ahead",
    "weighed_terms_ahead",
    "with_plain",
]
