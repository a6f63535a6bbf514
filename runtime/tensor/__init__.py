"""Handles tensors split over ranks: finds each rank's part, and exchanges parts.

Scripts import from here; the runtime's own files import from the modules.
"""

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
from autopar.runtime.tensor.shards import Split, local_size
from autopar.runtime.tensor.vocabulary import (
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
    vocab_parallel_embedding_bag,
)

__all__ = [
    "Split",
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
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_embedding_bag",
]
