"""The norm and the sums against one process that has the whole model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.model.parts import shard_parameters
from autopar.runtime.optimizer.gradients import (
    _end_to_end,
    clip_by_global_norm,
    gradient_memory,
    local,
    local_gradients,
    sum_replicated,
)
from autopar.runtime.ranks.mesh import Mesh, start
from autopar.runtime.tensor.shards import Split, local_part
from tests.runtime.processes import LOG, run_on_ranks
from tests.strict.log import Issued
from tests.strict.ranks import run_on_strict_ranks

STAGES = (("embedding", "first"), ("second", "embedding"))  # the embedding is tied
SPLITS = {
    "embedding.weight": Split(0, ((7, 1),)),
    "first.weight": Split(0, ((3, 1), (2, 1))),
    "second.weight": Split(1, ((5, 1),)),
}


def _model(names: tuple[str, ...]) -> nn.ModuleDict:
    layers: dict[str, nn.Module] = {
        "embedding": nn.Embedding(7, 5),
        "first": nn.Linear(5, 5),
        "second": nn.Linear(5, 5),
    }
    return nn.ModuleDict({name: layers[name] for name in names}).double()


def _gradient(name: str, shape: torch.Size) -> Tensor:
    seed = sum(name.encode())
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _one_process(max_norm: float) -> tuple[float, dict[str, Tensor]]:
    model = _model(("embedding", "first", "second"))
    for name, parameter in model.named_parameters():
        parameter.grad = _gradient(name, parameter.shape)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _set_gradients(model: nn.Module, mesh: Mesh) -> None:
    whole = dict(_model(("embedding", "first", "second")).named_parameters())
    for name, parameter in model.named_parameters():
        gradient = _gradient(name, whole[name].shape)
        if name in SPLITS:
            gradient = local_part(gradient, SPLITS[name], mesh.tensor)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def _clip(sizes: tuple[int, int, int, int], zero: bool, max_norm: float) -> float:
    pipeline, data, tensor, shard = sizes
    mesh = start(pipeline=pipeline, data=data, tensor=tensor, shard=shard)
    names = STAGES[mesh.pipeline.rank] if pipeline > 1 else ("embedding", "first", "second")
    model = _model(names)
    splits = {name: split for name, split in SPLITS.items() if name.split(".")[0] in names}
    shard_parameters(model, splits, mesh.tensor)
    if zero:  # the first layer stays plain, as parameters outside any sharded unit do
        sharded = [module for name, module in model.items() if name != "first"]
        axes = ("replica", "shard") if mesh.replica.size > 1 else ("shard",)
        for module in sharded:
            fully_shard(module, mesh=mesh.device_mesh[axes])
    _set_gradients(model, mesh)
    tied = frozenset(("embedding.weight",) if mesh.pipeline.rank else ())
    norm = clip_by_global_norm([model], max_norm, mesh, split=SPLITS, tied=tied)
    _compare_gradients(model, mesh, max_norm)
    return norm.item()


def _compare_gradients(model: nn.Module, mesh: Mesh, max_norm: float) -> None:
    _, expected = _one_process(max_norm)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        wanted = expected[name]
        if name in SPLITS:
            wanted = local_part(wanted, SPLITS[name], mesh.tensor)
        torch.testing.assert_close(whole, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ((1, 1, 2, 1), False),
        ((1, 2, 1, 2), True),
        ((1, 2, 2, 2), True),
        ((2, 1, 1, 1), False),
        ((1, 4, 1, 2), True),
        ((2, 2, 2, 2), True),
        ((2, 2, 2, 1), False),
    ],
)
def test_the_norm_counts_every_element_once(
    sizes: tuple[int, int, int, int], zero: bool, max_norm: float
) -> None:
    expected, _ = _one_process(max_norm)
    for found in run_on_ranks(_clip, sizes[0] * sizes[1] * sizes[2], sizes, zero, max_norm):
        assert found == pytest.approx(expected, rel=0, abs=1e-12)


def _clip_bfloat16() -> float:
    mesh = start(pipeline=1, data=1, tensor=1)
    layer = nn.Linear(64, 64, bias=False).bfloat16()
    layer.weight.grad = torch.full((64, 64), 1.01).bfloat16()
    expected = layer.weight.grad.float().norm().item()
    found = clip_by_global_norm([layer], 1.0, mesh).item()
    dist.destroy_process_group()
    return float(abs(found / expected - 1))


def test_the_norm_of_half_precision_gradients_is_taken_in_single_precision() -> None:
    assert _clip_bfloat16() < 1e-6


def _sum(zero: bool) -> list[list[float]]:
    mesh = start(pipeline=1, data=2, tensor=2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False).double())
    if zero:
        for module in model:
            fully_shard(module, mesh=mesh.device_mesh["shard"])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter.detach(), 1.0 + mesh.tensor.rank)
    model[0].bias.grad = None
    sum_replicated([model], [name for name, _ in model.named_parameters()], mesh.tensor)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert gradients[1] is None
    return [sorted(set(local(g).flatten().tolist())) for g in gradients if g is not None]


@pytest.mark.parametrize("zero", [False, True])
def test_partial_gradients_of_replicated_parameters_are_summed(zero: bool) -> None:
    assert run_on_ranks(_sum, 4, zero) == [[[3.0], [3.0]]] * 4


class Joined(TorchDispatchMode):
    """Counts the bytes that are copied to lie together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.copied_bytes += made.nbytes
        return made


class _Side(nn.Module):
    """Three layers side by side: two large ones and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for size in (600, 600, 3))

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x[:, : layer.in_features]).sum() for layer in self.layers), x.sum())


def _sum_in_place() -> tuple[int, list[tuple[str, int]], bool]:
    mesh = start(pipeline=1, data=2, tensor=2)
    model = wrap(_Side(), mesh, zero=0, apart=[["layers.*.weight"]])
    model(torch.ones(2, 600)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    expected = [2 * one for one in gradients if one is not None]
    LOG.events.clear()
    with Joined() as joined:
        sum_replicated([model], [name for name, _ in model.named_parameters()], mesh.tensor)
    issued = [(one.op, one.size_bytes) for one in LOG.events if isinstance(one, Issued)]
    found = [one for one in gradients if one is not None]
    return joined.copied_bytes, issued, all(map(torch.equal, found, expected))


def test_large_gradients_are_summed_where_they_lie() -> None:
    large, small = 600 * 600 * 4, (600 + 600 + 3 + 9) * 4
    for copied, issued, is_right in run_on_strict_ranks(_sum_in_place, 4):
        assert is_right
        assert copied == small
        assert sorted(issued) == [("all_reduce", small), *[("all_reduce", large)] * 2]


def test_gradients_of_a_bucket_are_one_run_in_either_order() -> None:
    memory = torch.zeros(20)
    parts = [memory[10:20].view(2, 5), memory[4:10], memory[0:4], torch.zeros(3)]
    for order in (parts, parts[2::-1]):
        first, *others = _end_to_end(order)
        assert (first.numel(), first.data_ptr()) == (20, memory.data_ptr())
        assert [one.numel() for one in others] == [3] * (len(order) - 3)


def _clip_buckets(zero: int, max_norm: float) -> tuple[float, int, list[Tensor]]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = wrap(_layers(), mesh, zero=zero)
    _loss(model, mesh.data.rank).backward()  # type: ignore[no-untyped-call]
    norm = clip_by_global_norm([model], max_norm, mesh)
    held = [one.value.reshape(-1).clone() for one in local_gradients([model])]
    return norm.item(), len(gradient_memory([model])), held


class _Layers(nn.Module):
    """Layers of which the output does not need the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 3), nn.Linear(4, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.third(self.first(x))
        return output


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return _Layers().double()


def _loss(model: nn.Module, row: int) -> Tensor:
    loss: Tensor = model(torch.arange(5.0, dtype=torch.float64) + row).square().sum()
    return loss


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_of_a_bucket_are_clipped_as_one_tensor(zero: int, max_norm: float) -> None:
    model = _layers()
    (torch.stack([_loss(model, row) for row in (0, 1)]).mean()).backward()  # type: ignore[no-untyped-call]
    expected = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    gradients = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    found = run_on_ranks(_clip_buckets, 2, zero, max_norm)
    for norm, tensors, _ in found:
        assert norm == pytest.approx(expected, rel=0, abs=1e-12)
        assert tensors == 1
    held = [torch.cat(one) for *_, one in found]
    wanted = torch.cat(gradients).sort().values
    if zero == 0:
        for one in held:
            torch.testing.assert_close(one.sort().values, wanted, rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(torch.cat(held).sort().values, wanted, rtol=0, atol=1e-12)


def _unclipped(max_norm: float | None) -> float:
    mesh = start(pipeline=1, data=1, tensor=1)
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 5.0)
    clip_by_global_norm([model], max_norm, mesh)
    return min(float(parameter.grad.min()) for parameter in model.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize(("max_norm", "kept"), [(0.0, True), (None, True), (1.0, False)])
def test_no_norm_clips_nothing(max_norm: float | None, kept: bool) -> None:
    (smallest,) = run_on_ranks(_unclipped, 1, max_norm)
    assert (smallest == 5.0) is kept
