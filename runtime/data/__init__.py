"""Reads rows of a dataset, and weights losses.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.data.batches import (
    Batch,
    Weighed,
    read_dataset,
)
from autopar.runtime.data.loss import (
    in_float32,
    loss_in,
    mean_loss,
    read_batches,
    scale_loss,
    with_plain,
)

__all__ = [
    "Batch",
    "Weighed",
    "in_float32",
    "loss_in",
    "mean_loss",
    "read_batches",
    "read_dataset",
    "scale_loss",
    "with_plain",
]
