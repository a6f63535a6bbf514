"""Turns modules and optimizers into the category of every storage that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import Optimizer

from autopar.runtime.data_parallel.wrapping import buckets_of
from autopar.runtime.optimizer.pieces import local_tensor


def owners_of(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Map storages to what they are for; where two claim one, the later below is right."""
    owners: dict[int, str] = {}
    for optimizer in optimizers:
        _claim(owners, "optimizer", _optimizer_tensors(optimizer))
    for module in modules:
        _claim(owners, "parameters", (*module.parameters(), *module.buffers()))
        _claim(owners, "unsharded parameters", _unsharded_parameters(module))
        _claim(owners, "parameters", _sharded_parameters(module))
        _claim(owners, "gradients", _gradients(module))
    return owners


def _claim(
    owners: dict[int, str], category: str, tensors: Sequence[Tensor] | Iterator[Tensor]
) -> None:
    for tensor in tensors:
        owners[local_tensor(tensor).untyped_storage()._cdata] = category


def _optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the states, and the masters that stand in the place of 16-bit parameters."""
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
    """Yield whole parameters, and the messages that they are copied out of."""
    for group in _fsdp_groups(module):
        for result in (group._all_gather_result, _waiting_result(group)):
            if result is not None:
                yield result.all_gather_output
    for fsdp_parameter in _fsdp_parameters(module):
        yield from fsdp_parameter.all_gather_outputs
        whole = getattr(fsdp_parameter, "_unsharded_param", None)
        if whole is not None:
            yield whole


def _sharded_parameters(module: nn.Module) -> Iterator[Tensor]:
    for fsdp_parameter in _fsdp_parameters(module):
        yield fsdp_parameter._sharded_param_data


def _waiting_result(group: FSDPParamGroup) -> Any:
    """Return the last gathered message, kept until the next copy out is over."""
    state = getattr(group.comm_ctx, "all_gather_state", None)  # absent before the first forward
    return None if state is None else state.all_gather_result


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
