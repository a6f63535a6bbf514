"""Rows of a dataset, and the weight of each loss.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.data.batches import (
    Batch,
    Weighed,
    gathered_rows,
    read_batches,
    read_dataset,
)
from autopar.runtime.data.loss import (
    in_float32,
    loss_in,
    mean_loss,
    scale_loss,
    summed_rows,
    weighted,
    weighted_terms,
    with_plain,
)
from autopar.runtime.data.rows import to_device

__all__ = [
    "Batch",
    "Weighed",
    "gathered_rows",
    "in_float32",
    "loss_in",
    "mean_loss",
    "read_batches",
    "read_dataset",
    "scale_loss",
    "summed_rows",
    "to_device",
    "weighted",
    "weighted_terms",
    "with_plain",
]
