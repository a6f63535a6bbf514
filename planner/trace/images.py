"""Finds the images of a batch that should be in channels_last memory format on a GPU.

A GPU convolves in channels_last, and copies contiguous tensors before and after each convolution.
Batch norms of contiguous tensors take three times as long (measured). Convolutions keep the format
of their input, so it is enough to convert the images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from autopar.planner.graph.graph import Graph
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of
from autopar.planner.trace.build import TracedSubject


def channels_last_inputs(subject: TracedSubject, graph: Graph) -> tuple[str, ...]:
    """Return the images that may be channels_last; () if the model convolves no images.

    Code of the author that needs contiguous images (a `view` over channels) fails in a forward with
    fake tensors. The result is () then, too.
    """
    is_convolved = any(
        kind_of(op) is OpKind.CONVOLUTION and len(graph.tensors[op.inputs[0]].shape) == _IMAGE_DIMS
        for op in graph.ops
    )
    if not is_convolved:
        return ()
    images = tuple(key for key in sorted(subject.step.keys) if _is_image(subject.batch.get(key)))
    try:
        with FakeTensorMode():
            state = {
                name: torch.empty(value.shape, dtype=value.dtype)
                for name, value in _state_of(subject.model).items()
            }
            batch = {key: _fake(subject.batch[key], key in images) for key in subject.step.keys}
            functional_call(subject.model, state, kwargs=batch, strict=False)
    except Exception:  # any error of the model's code: its images stay contiguous
        return ()
    return images


_IMAGE_DIMS = 4


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == _IMAGE_DIMS and value.is_floating_point()


def _state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    tensors = (model.named_parameters, model.named_buffers)
    return {name: value for each in tensors for name, value in each(remove_duplicate=False)}


def _fake(value: Any, is_image: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    order = torch.channels_last if is_image else torch.contiguous_format
    return torch.empty(value.shape, dtype=value.dtype, memory_format=order)
