"""Handles tensors split over ranks: finds each rank's part, and exchanges parts.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.tensor import vocabulary
from autopar.runtime.tensor.chunked_logits import chunk_logits
from autopar.runtime.tensor.collectives import (
    exchange,
    first_gradient,
    first_only,
    first_whole,
    gather,
    gather_whole,
    place_own,
    scatter_sum,
    sum_both,
    sum_gradients,
    sum_partials,
    take_own,
    take_shard,
)
from autopar.runtime.tensor.shards import Split, local_size, whole_length
from autopar.runtime.tensor.vocabulary import *  # noqa: F403  (the list is its own)

__all__ = [
    "Split",
    "chunk_logits",
    "exchange",
    "first_gradient",
    "first_only",
    "first_whole",
    "gather",
    "gather_whole",
    "local_size",
    "place_own",
    "scatter_sum",
    "sum_both",
    "sum_gradients",
    "sum_partials",
    "take_own",
    "take_shard",
    "whole_length",
]
__all__ += vocabulary.__all__
