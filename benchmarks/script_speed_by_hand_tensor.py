"""GPT-2 split by hand over two tensor ranks with torch's parallelize_module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from benchmarks.script_speed_by_hand import (
    ADAMW,
    MAX_NORM,
    Batch,
    Step,
    gradients_of,
    grouped,
    mean_loss,
)


def tensor_parallel(model: nn.Module) -> Step:
    """Train with column- and row-wise linears, and embedding and loss split by the vocabulary."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in _blocks_by_heads(model, mesh):
        parallelize_module(block, mesh, _linears())
    outer: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outer)
    return _step_of(model)


def sequence_parallel(model: nn.Module) -> Step:
    """Train in the same way, with norms, dropout and residual sums split along the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner: dict[str, ParallelStyle] = {
        "ln_1": SequenceParallel(),
        "attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        "ln_2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in _blocks_by_heads(model, mesh):
        parallelize_module(block, mesh, inner)
    outer: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "ln_f": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, outer)
    return _step_of(model)


def _linears() -> dict[str, ParallelStyle]:
    return {
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(),
    }


def _blocks_by_heads(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Order the rows of every query-key-value matrix so that a rank's rows are its heads' own."""
    ranks = mesh.size()
    for block in model.h:
        attention = block.attn
        width = attention.widths[0]
        rows = torch.arange(3 * width).view(3, ranks, width // ranks).transpose(0, 1).flatten()
        with torch.no_grad():
            attention.c_attn.weight.copy_(attention.c_attn.weight[rows])
            attention.c_attn.bias.copy_(attention.c_attn.bias[rows])
        attention.widths = (width // ranks,) * 3
    return list(model.h)


def _step_of(model: Any) -> Step:
    model.lm_head.weight = model.wte.weight  # parallelize_module unties them; both are Shard(0)
    parameters: list[Any] = list(model.parameters())
    split: list[Any] = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    whole: list[Any] = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    # A group must not mix DTensors with plain tensors: a fused kernel takes only one kind.
    optimizer = AdamW([*grouped(split), *grouped(whole)], **ADAMW)

    def step(microbatches: Sequence[Batch]) -> Tensor:
        total = torch.zeros(())
        for batch in microbatches:
            with loss_parallel():
                loss: Any = mean_loss(model(batch["input_ids"]), batch) / len(microbatches)
                loss.backward()
            total += loss.detach().to_local()
        _clip(split, whole)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _clip(split: list[nn.Parameter], whole: list[nn.Parameter]) -> None:
    norm_of_split: Any = get_total_norm(gradients_of(split), foreach=True)
    norms = [norm_of_split.full_tensor()]
    if whole:
        norms.append(get_total_norm(gradients_of(whole), foreach=True))
    norm = torch.stack(norms).norm()
    for parameters in filter(None, (split, whole)):
        clip_grads_with_norm_(parameters, MAX_NORM, norm, foreach=True)
