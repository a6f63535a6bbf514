"""The names that every script knows, and the statements that import them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FROM: Mapping[str, str] = MappingProxyType(
    {
        "collections.abc": "Callable Iterable Iterator Mapping Sequence",
        "functools": "partial",
        "itertools": "islice",
        "pathlib": "Path",
        "typing": "Any",
        "torch": "Tensor nn",
        "torch.optim": "AdamW Optimizer",
        "autopar.runtime.apart": "keep_apart",
        "autopar.runtime.data": "Batch dataset_batches gathered_rows placed synthetic_batches",
        "autopar.runtime.data_parallel": "set_last wrap",
        "autopar.runtime.dryrun": "recording",
        "autopar.runtime.gradients": "clip_by_global_norm sum_replicated",
        "autopar.runtime.initial_weights": "Recipe record",
        "autopar.runtime.keeping.keeper": "Keeper",
        "autopar.runtime.keeping.options": "add_keeping",
        "autopar.runtime.layer_names": "named numbered",
        "autopar.runtime.loss": (
            "Weighed loss_in mean_loss scale_loss weighed_ahead weighed_terms_ahead"
        ),
        "autopar.runtime.loss_scaling": "LossScale",
        "autopar.runtime.mesh": "Axis Mesh start stop",
        "autopar.runtime.model_parts": "Crossing StagePart freeze names_of submodules take_classes",
        "autopar.runtime.model_source": "note_changes note_device refuse_changes",
        "autopar.runtime.optimizer": "build_optimizer",
        "autopar.runtime.pipeline": "Pipeline Stage build_schedule stage_at stage_indices",
        "autopar.runtime.progress": "Progress",
        "autopar.runtime.randomness": "seed_all",
        "autopar.runtime.recompute": "recompute",
        "autopar.runtime.refusal": "OptionParser from_one from_zero norm",
        "autopar.runtime.shards": "Split shard_parameters",
        "autopar.runtime.tied": "Tie TiedWeights",
        "autopar.runtime.weights": "load_weights",
        "autopar.runtime.written_buffers": "update_once",
    }
)
_PLAIN = ("argparse", "copy", "importlib", "sys", "torch")
KNOWN: Mapping[str, str] = MappingProxyType(
    {name: f"import {name}" for name in _PLAIN}
    | {
        name: f"from {module} import {name}"
        for module, names in _FROM.items()
        for name in names.split()
    }
)
