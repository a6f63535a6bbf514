"""Tells what a model holds when its training begins, whatever way it was filled in."""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

OURS = (
    "_load_state_dict_pre_hooks",
    "_autopar_chunks",
    "_is_param",
    "_fsdp_orig_uid",
    "_is_hf_initialized",
)


def reached(model: nn.Module) -> dict[str, Any]:
    """Return every tensor and every plain value that can be reached from a model, by its path."""
    return dict(_reached(model, "model", {}))


def _reached(value: Any, path: str, seen: dict[int, tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (int, float, str, bool, torch.dtype, type(None))):
        yield path, value
        return
    if id(value) in seen:
        yield path, f"as {seen[id(value)][0]}"
        return
    seen[id(value)] = path, value
    if isinstance(value, Tensor):
        yield path, value
    if isinstance(value, torch.Generator):
        yield path, value.get_state()
    for name, part in _parts(value).items():
        if name not in OURS:
            yield from _reached(part, f"{path}.{name}", seen)


def _parts(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Tensor):
        return {**vars(value), "class": type(value).__name__, "learns": value.requires_grad}
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, partial):
        return {"function": value.func, "arguments": value.args}
    if isinstance(value, type) or type(value).__module__.startswith("transformers.conf"):
        return {}
    if isinstance(value, FunctionType):
        return {name: cell.cell_contents for name, cell in enumerate(value.__closure__ or ())}
    return getattr(value, "__dict__", {})


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """Say what two models do not hold alike, to the bit."""
    mine, theirs = reached(model), reached(expected)
    found = [f"{path} is missing" for path in theirs if path not in mine]
    found += [f"{path} is new" for path in mine if path not in theirs]
    for path in mine.keys() & theirs.keys():
        if not is_same(mine[path], theirs[path]):
            found.append(f"{path}: {mine[path]!r:.200}, not {theirs[path]!r:.200}")
    return found


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors to the bit."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    if one.layout is not torch.strided or one.is_quantized:
        return torch.equal(one.to_dense(), other.to_dense())
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.detach().as_subclass(Tensor).reshape(-1)).view(torch.uint8)
