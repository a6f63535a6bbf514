"""Builds a model file's model on the meta device, where tensors have no values.

The model is built as scripts build it. Therefore this file, alone in the planner, imports the
runtime's code that builds models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from autopar.planner.errors import InputError
from autopar.planner.model.guard import ModelMovedError, not_moved
from autopar.planner.model.model_file import ModelFile
from autopar.runtime.model.plain_tensors import sharing
from autopar.runtime.tensor.shards import made_like
from autopar.runtime.weights.initial_weights import meta_model, strip
from autopar.runtime.weights.plain_model import plain_model

Refuse: TypeAlias = Callable[[nn.Module], None]


def without_memory(model_file: ModelFile, refuse: Refuse = lambda _: None) -> nn.Module:
    """Build a model on the meta device; on the CPU first if its constructor cannot be recorded.

    `refuse` raises an error for a model that no script could train.
    """
    check = _Check(refuse, str(model_file.path))
    try:
        with not_moved(model_file.path):
            return meta_model(model_file.build_model, check)
    except ModelMovedError:
        raise
    except Exception:  # with_memory raises the constructor's own error again
        if check.has_begun:
            raise
        model = with_memory(model_file, refuse)
    if isinstance(model, nn.Module):
        strip(model)
    return model


def with_memory(model_file: ModelFile, refuse: Refuse = lambda _: None) -> nn.Module:
    """Build a model on the CPU, with values, as plain PyTorch does."""
    with not_moved(model_file.path):
        model = plain_model(model_file.build_model, seed=0)
    if isinstance(model, nn.Module):
        _Check(refuse, str(model_file.path))(model)
    return model


def marked_like(tensor: Tensor, original: Tensor) -> None:
    """Give a stand-in (`tensor`) the class and the attributes of the original parameter."""
    made_like(tensor, original)


class _Check:
    """Raises an error for a model that no script could train, before its tensors move to meta."""

    def __init__(self, refuse: Refuse, where: str) -> None:
        self.has_begun = False
        self._refuse, self._where = refuse, where

    def __call__(self, model: nn.Module) -> None:
        self.has_begun = True
        self._refuse(model)
        for name, other in sharing(model):
            if name == f"{other}_orig":
                continue  # from torch's older spectral_norm; the trace reports it
            raise InputError(
                f"{other} lies in the memory of the parameter {name}, but is not the same tensor",
                where=self._where,
                expected="two tensors with memory of their own, or one tensor under both names: "
                "each rank holds its part",
                fix="to tie two parameters, give both modules one (decoder.weight = "
                "encoder.weight); else copy it (.clone()), or compute it in the forward",
            )
