"""The names that scripts know, and their imports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

_FROM: Mapping[str, str] = MappingProxyType(
    {
        "argparse": "Namespace",
        "collections.abc": "Callable Iterable Iterator Mapping Sequence",
        "functools": "partial",
        "itertools": "islice",
        "pathlib": "Path",
        "typing": "Any",
        "torch": "Tensor nn",
        "torch.optim": "Optimizer",
        "autopar.runtime.data": (
            "Batch Weighed gathered_rows in_float32 loss_in to_device read_batches read_dataset "
            "scale_loss summed_rows weighted weighted_terms with_plain"
        ),
        "autopar.runtime.data_parallel": "set_last wrap",
        "autopar.runtime.evaluation": (
            "Evaluation Plainly first_step_checked one_by_one read_evaluation with_gradients"
        ),
        "autopar.runtime.checkpointing": "Keeper",
        "autopar.runtime.model": (
            "ROWS Crossing StagePart compile_layers freeze keep_apart named names_of expand "
            "submodules take_classes"
        ),
        "autopar.runtime.optimizer": (
            "LossScale adamw build_optimizer build_scheduler clip_by_global_norm sum_replicated "
            "warmup_cosine"
        ),
        "autopar.runtime.pipeline": ("Pipeline Stage Tie build_schedule stage_at stage_indices"),
        "autopar.runtime.ranks": (
            "Axis Mesh warn_if_changed read_options refuse_changes seed_all start stop "
            "tell_errors_once"
        ),
        "autopar.runtime.recompute": "recompute update_once",
        "autopar.runtime.tensor": "Split shard_parameters",
        "autopar.runtime.weights": "Recipe load_weights record",
    }
)
_PLAIN = ("copy", "importlib", "sys", "torch")
# For the plain PyTorch loop of `autopar verify --plain`, in addition.
_FROM_ALONE: Mapping[str, str] = MappingProxyType(
    {
        "itertools": "count",
        "unittest.mock": "patch",
        "torch.optim": "AdamW",
        "torch.optim.lr_scheduler": "LambdaLR",
        "torch.utils._python_dispatch": "TorchDispatchMode",
    }
)
_PLAIN_ALONE = ("hashlib", "math", "random")


def _statements(plain: Iterable[str], members: Mapping[str, str]) -> Mapping[str, str]:
    whole = {name: f"import {name}" for name in plain}
    listed = ((module, name) for module, names in members.items() for name in names.split())
    return MappingProxyType(whole | {name: f"from {one} import {name}" for one, name in listed})


KNOWN = _statements(_PLAIN, _FROM)
KNOWN_ALONE = MappingProxyType(
    {name: statement for name, statement in KNOWN.items() if "autopar" not in statement}
    | {**_statements(_PLAIN_ALONE, _FROM_ALONE)}
)
