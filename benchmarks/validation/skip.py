"""Says why a row cannot be predicted, in a few words that are the same for all such rows."""

from __future__ import annotations

import re
from collections.abc import Callable

from autopar.planner.errors import InputError
from benchmarks.validation.settings import float8_of, remade_of
from benchmarks.validation.table import Row, stated

NEEDED = (
    *("layers", "hidden", "heads", "seq_len", "gpu", "gpus", "gpus_per_node", "dtype", "tp", "pp"),
    *("dp", "micro_batch", "global_batch", "recompute"),
)
TIMES = ("iteration_time_s", "tokens_per_s_per_gpu", "samples_per_s")
DTYPES = ("bf16", "fp16")
_DOUBTFUL = re.compile(r"\bWARNING\b|\bambiguous\b")
_ADAPTED = re.compile(r"\blora\b", re.IGNORECASE)
_EXPERTS = re.compile(r"\bmoe\b|mixtral|mamba|deepseek", re.IGNORECASE)
_FAMILIES = re.compile(r"gpt|llama|qwen|mistral|nemotron|mpt|opt|bloom", re.IGNORECASE)
_UNSPLIT = re.compile(r"microbatches, count not stated", re.IGNORECASE)


def reason_to_skip(row: Row) -> str:
    """Return why a row is not predicted, empty if it is."""
    missing = [name for name in NEEDED if not getattr(row, name)]
    if missing:
        return f"not stated: {', '.join(missing)}"
    if not any(getattr(row, name) for name in TIMES):
        return "no time or throughput"
    return next((reason for reason, holds in _REASONS if holds(row)), "") or _refused(row)


def _has_experts(row: Row) -> bool:
    return (row.experts or 1) > 1 or bool(_EXPERTS.search(row.model_family))


def _batch_is_uneven(row: Row) -> bool:
    return stated(row.global_batch) % (stated(row.dp) * stated(row.micro_batch)) > 0


def _layers_are_few(row: Row) -> bool:
    return stated(row.layers) < stated(row.pp) * (row.vpp or 1)


def _rounds_are_uneven(row: Row) -> bool:
    """Whether an interleaved schedule would have a last round with fewer microbatches."""
    pipeline = stated(row.pp)
    microbatches = stated(row.global_batch) // (stated(row.dp) * stated(row.micro_batch))
    return (row.vpp or 1) > 1 and pipeline > 1 and microbatches % pipeline > 0


_REASONS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("precision is not modelled", lambda row: row.dtype not in DTYPES and float8_of(row) is None),
    ("experts, state spaces and latent attention are not modelled", _has_experts),
    ("adapters (LoRA) are not modelled", lambda row: bool(_ADAPTED.search(row.notes))),
    ("context parallelism is not modelled", lambda row: (row.cp or 1) > 1),
    ("the model's family is not in the zoo", lambda row: not _FAMILIES.search(row.model_family)),
    ("its own notes doubt it", lambda row: bool(_DOUBTFUL.search(row.notes))),
    ("microbatches are not stated", lambda row: bool(_UNSPLIT.search(row.notes))),
    ("global batch is no multiple of data ranks and microbatch", _batch_is_uneven),
    ("fewer layers than stages", _layers_are_few),
    ("microbatches do not fill rounds of the interleaved schedule", _rounds_are_uneven),
)


def _refused(row: Row) -> str:
    try:
        remade_of(row.recompute)
    except InputError as error:
        return error.found
    return ""
