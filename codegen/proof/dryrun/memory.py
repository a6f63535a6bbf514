"""Counts the memory of a dry run by category, as if its ops ran as CUDA kernels.

Some ops are one kernel in CUDA and several on a CPU, which save more for the backward: an RMS norm
(its input in fp32, twice), dropout (the mask in the values' dtype) and attention with dropout (all
scores). Stand-ins for these save what the CUDA kernel saves. Temporary workspaces of kernels are
not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn import functional
from torch.optim import Optimizer

from autopar.runtime.data_parallel.wrapping import buckets_of
from autopar.runtime.optimizer.pieces import local_tensor

_attention = functional.scaled_dot_product_attention


class _RMSNorm(torch.autograd.Function):
    """An RMS norm as one kernel, which saves its input, the weight and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        per_row = torch.empty(x.shape[: x.dim() - dims], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, per_row)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        x, weight = ctx.saved_tensors[:2]
        of_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(x), of_weight, None


def _rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,  # noqa: ARG001
) -> Tensor:
    out: Tensor = _RMSNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return out


def _dropout(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001
) -> Tensor:
    return torch.native_dropout(input, p, train=True)[0] if training and p else input


def _torch_dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
    return _dropout(input, p, train)


def _attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    del dropout_p  # fused: only a generator state is saved
    out: Tensor = _attention(query, key, value, attn_mask, is_causal=is_causal, **options)
    return out


def _channel_statistics(_: Tensor, mean: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mean), torch.empty_like(mean)  # torch cannot infer shapes for this op


REPLACED = (
    (functional, "rms_norm", _rms_norm),
    (torch, "rms_norm", _rms_norm),
    (functional, "dropout", _dropout),
    (torch, "dropout", _torch_dropout),
    (functional, "scaled_dot_product_attention", _attention_with_dropout),
    (torch, "batch_norm_update_stats", _channel_statistics),
)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Replace torch's functions by stand-ins that allocate and save as CUDA kernels do."""
    with ExitStack() as stack:
        for owner, name, stand_in in REPLACED:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def categories_of(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Map storages to categories; a storage with several gets the one that is claimed last."""
    owners: dict[int, str] = {}
    for optimizer in optimizers:
        _claim(owners, "optimizer", _optimizer_tensors(optimizer))
    for module in modules:
        _claim(owners, "parameters", (*module.parameters(), *module.buffers()))
        _claim(owners, "unsharded parameters", _unsharded_parameters(module))
        shards = (one._sharded_param_data for one in _fsdp_parameters(module))
        _claim(owners, "parameters", shards)
        _claim(owners, "gradients", _gradients(module))
    return owners


def _claim(owners: dict[int, str], category: str, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        owners[local_tensor(tensor).untyped_storage()._cdata] = category


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the states, and the optimizer's parameters, which may be fp32 masters."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    buckets = buckets_of(module)
    if buckets is not None:
        yield from buckets.buffers
    for fsdp_parameter in _fsdp_parameters(module):
        if fsdp_parameter.sharded_param.grad is not None:
            yield fsdp_parameter.sharded_param.grad
        whole = getattr(fsdp_parameter, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            yield whole.grad
        if fsdp_parameter.unsharded_accumulated_grad is not None:
            yield fsdp_parameter.unsharded_accumulated_grad


def _unsharded_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield unsharded parameters, and the all-gather outputs that they are copied from."""
    for group in _fsdp_groups(module):
        # FSDP keeps the last result until the next copy-out; absent before the first forward
        last = getattr(group.comm_ctx, "all_gather_state", None)
        for result in (group._all_gather_result, getattr(last, "all_gather_result", None)):
            if result is not None:
                yield result.all_gather_output
    for fsdp_parameter in _fsdp_parameters(module):
        yield from fsdp_parameter.all_gather_outputs
        whole = getattr(fsdp_parameter, "_unsharded_param", None)
        if whole is not None:
            yield whole


def _fsdp_parameters(module: nn.Module) -> Iterator[FSDPParam]:
    for group in _fsdp_groups(module):
        yield from group.fsdp_params


def _fsdp_groups(module: nn.Module) -> Iterator[FSDPParamGroup]:
    for child in module.modules():
        if isinstance(child, FSDPModule):
            state: Any = child._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # of torch 2.11
                yield state._fsdp_param_group


# storage → category, for storages that a category claims (see categories_of)
Owners: TypeAlias = Callable[[], Mapping[int, str]]

# Categories are looked up again only if a new peak exceeds that of the last look-up by this ratio,
# because a look-up visits all live storages. Until then, a new storage has its default category.
LOOK_UP_EVERY = 1.005


def kept_on_host(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield the shards of parameters that fully_shard keeps in the host's memory."""
    for module in modules:
        for one in _fsdp_parameters(module):
            if one.offload_to_cpu:
                # the first forward makes _sharded_param_data a view, or a padded copy, of this
                yield local_tensor(one.sharded_param)


@dataclass(slots=True)
class _Live:
    reference: weakref.ref[UntypedStorage]
    size: int
    default_category: str  # its category if no category claims it
    category: str


class LiveMemory:
    """Counts the bytes of all live storages; those in the host's memory are counted separately.

    Dry runs have only CPU tensors. A tensor counts as lying in the host's memory if it was put
    there (`put_on_host`), or made by an op from such a tensor.
    """

    def __init__(self) -> None:
        self.host_peak_bytes = self._host_bytes = 0
        self._on_host: dict[int, weakref.ref[UntypedStorage]] = {}
        self._allocates_on_host = False
        self.peak_bytes = 0
        self.peak_by_category: Counter[str] = Counter()
        self._live: dict[int, _Live] = {}
        self._by_category: Counter[str] = Counter()
        self._bytes = 0
        self._looked_up_bytes = 0
        self._owners: Owners | None = None

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._allocates_on_host:
            self.put_on_host(tensor)
        if key in self._live or key in self._on_host:
            return
        category = "temporary" if _runs_in_backward() else "activations"
        live = _Live(
            reference=weakref.ref(storage, lambda _: self._forget(key)),
            size=0,
            default_category=category,
            category=category,
        )
        self._live[key] = live
        self._resize(live, storage.nbytes())

    @contextmanager
    def allocating_on_host(self) -> Iterator[None]:
        """While the code inside runs, count all storages that it makes as host memory."""
        self._allocates_on_host = True
        yield
        self._allocates_on_host = False

    def put_on_host(self, tensor: Tensor) -> Tensor:
        """Count a tensor's storage as host memory from now on, and return the tensor."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            self._forget(key)
        if key not in self._on_host:
            self._host_bytes += size
            self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)

            def freed(_: object) -> None:
                del self._on_host[key]
                self._host_bytes -= size

            self._on_host[key] = weakref.ref(storage, freed)
        return tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the host's memory."""
        return bool(self._on_host) and tensor.untyped_storage()._cdata in self._on_host

    def leave_out_host(self, owners: Mapping[int, str], given: Iterable[Tensor]) -> None:
        """Stop counting live storages, except claimed ones and the step's arguments.

        The others are rows read ahead, which a real training has in host memory.
        """
        kept = owners.keys() | {one.untyped_storage()._cdata for one in given}
        for key in self._live.keys() - kept:
            self._resize(self._live[key], 0)

    @contextmanager
    def measuring(self, owners: Owners) -> Iterator[None]:
        """Measure the peak while the code inside runs."""
        self._owners = owners
        self.peak_bytes = self._looked_up_bytes = 0
        self.host_peak_bytes = self._host_bytes
        self._note_peak()
        yield
        self._owners = None

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Track storages that are resized in place, as by fully_shard."""
        resize = UntypedStorage.resize_

        def resize_and_count(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            live = self._live.get(storage._cdata)
            if live is not None:
                self._resize(live, size)
            return result

        with patch.object(UntypedStorage, "resize_", resize_and_count):
            yield

    def _forget(self, key: int) -> None:
        if key in self._live:
            self._resize(self._live.pop(key), 0)

    def _resize(self, live: _Live, size: int) -> None:
        self._bytes += size - live.size
        self._by_category[live.category] += size - live.size
        live.size = size
        self._note_peak()

    def _note_peak(self) -> None:
        if self._owners is None or self._bytes <= self.peak_bytes:
            return
        self.peak_bytes = self._bytes
        if self._bytes > self._looked_up_bytes * LOOK_UP_EVERY:
            self._looked_up_bytes = self._bytes
            self._look_up(self._owners())
        self.peak_by_category = +self._by_category

    def _look_up(self, owners: Mapping[int, str]) -> None:
        """Assign live storages to categories."""
        self._by_category.clear()
        for key, live in self._live.items():
            live.category = owners.get(key, live.default_category)
            self._by_category[live.category] += live.size


def _runs_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
