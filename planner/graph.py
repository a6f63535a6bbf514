"""The traced model as plain immutable data, with the one index that it carries."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.planner.index import Index
from autopar.planner.ops import (
    Buffer,
    Call,
    Constant,
    FunctionCall,
    Op,
    OwnGradient,
    Parameter,
    Tensor,
)


@dataclass(frozen=True, kw_only=True)  # without slots: it carries its index
class Graph:
    """A model with its loss, traced once for every batch size.

    `fixed_batch` is the one batch size of a model that takes it for a constant, `fixed_at` where.
    `recomputed_at` is where a model has torch compute something again (torch.utils.checkpoint),
    `autocast_at` where it chooses a precision of its own (torch.autocast), `devices_meet_at` where
    it creates a tensor on the CPU that its own device would not take.
    A model that noticed the trace may hand its modules something else in training: no mask, say.
    """

    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: Mapping[str, Constant]
    inputs: tuple[str, ...]
    calls: Mapping[str, Call]
    loss: str
    fixed_batch: int | None
    fixed_at: str = ""
    recomputed_at: str = ""
    autocast_at: str = ""
    devices_meet_at: str = ""
    was_noticed: bool = False
    functions: tuple[FunctionCall, ...] = ()  # a call inside another one stands before that
    own_gradients: tuple[OwnGradient, ...] = ()
    in_eval_mode: tuple[str, ...] = ()  # parts that learn, and compute otherwise in training

    def learns(self, op: Op) -> bool:
        """Whether gradients flow through what an op makes."""
        return any(self.tensors[name].requires_grad for name in op.outputs)

    @cached_property
    def index(self) -> Index:
        """Who makes and reads what, and what needs what."""
        return Index(self.ops, self.tensors, self.calls, self.functions)


def input_name(key: str, taken: Container[str]) -> str:
    """Return the name of the tensor that the batch has under a key, which a parameter may have."""
    return f'batch["{key}"]' if key in taken else key


def batch_key(name: str) -> str:
    """Return the key of an input in the batch."""
    return name.removeprefix('batch["').removesuffix('"]')
