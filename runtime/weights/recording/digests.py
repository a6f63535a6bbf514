"""Turns tensors, and the ops that make them, into numbers by which processes compare them."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from autopar.runtime.weights.recording.constants import bytes_of
from autopar.runtime.weights.recording.recorded_ops import History, RecordedOp, Value

_SEEN = 1024  # numbers of a large tensor that are looked at
_SEEN_IN_FILE = 8  # of one that lies in a file, of which little is to be read


def digest_of(tensor: Tensor, *, seen_numbers: int = _SEEN) -> int:
    """Return a number that tells a tensor from others, by all of its numbers or by many."""
    seen = tensor.detach()
    if seen.numel() > 2 * seen_numbers and seen.is_contiguous():
        seen = seen.view(-1)[:: seen.numel() // seen_numbers]
    return _number(bytes_of(seen).numpy().tobytes(), tuple(tensor.shape), tensor.dtype)


def digest_of_value(history: History, value: Value) -> int:
    """Return a number that tells how a tensor is made: by its ops, draws and constants."""
    numbers = _Numbers()
    made = [_told(history, op, numbers) for op in history.ops_for([value])]
    used = sorted(numbers.items(), key=lambda item: item[1])
    constants = [_of_constant(history, one) for one, _ in used if one in history.constants]
    return _number(made, constants, numbers.named(value))


def _of_constant(history: History, storage: int) -> int:
    in_file = history.constants.is_in_file(storage)
    seen = _SEEN_IN_FILE if in_file else _SEEN
    return digest_of(history.constants[storage], seen_numbers=seen)


class _Numbers(dict[int, int]):
    """Storages by the order in which they are met, which other ops before do not change."""

    def named(self, leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        place = self.setdefault(leaf.storage, len(self))
        return place, leaf.dtype, leaf.size, leaf.stride, leaf.offset


def _told(history: History, op: RecordedOp, numbers: _Numbers) -> tuple[Any, ...]:
    given = tree_map(numbers.named, (op.arguments, sorted(op.keywords.items())))
    if op.draw is None:
        return op.name, given
    origin, steps = history.origin(op.draw)
    state = None if origin.state is None else digest_of(origin.state)
    return op.name, given, origin.seed, state, steps


def _number(*parts: Any) -> int:
    data = b"/".join(one if isinstance(one, bytes) else repr(one).encode() for one in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 1
