import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from autopar.runtime.optimizer.gradients import local
from autopar.runtime.pipeline.stage import Tie, TiedWeights
from autopar.runtime.ranks.mesh import start
from tests.runtime.processes import run_on_ranks

TIE = Tie(("embedding.weight", "head.weight"), (0, 2))


def _stage(rank: int) -> nn.ModuleDict:
    layers: dict[str, nn.Module] = {"middle": nn.Linear(2, 2)}
    if rank == 0:
        layers = {"embedding": nn.Embedding(4, 3)}
    if rank == 2:
        layers = {"head": nn.Linear(3, 4, bias=False)}
    return nn.ModuleDict(layers)


def _train_once(zero: bool) -> tuple[list[float], list[str]]:
    mesh = start(pipeline=3, data=2 if zero else 1, tensor=1)
    model = _stage(mesh.pipeline.rank)
    if zero:
        for layer in model.values():
            fully_shard(layer, mesh=mesh.device_mesh["shard"])
    weight = next(model.parameters())
    ties = TiedWeights(mesh, [model], [TIE])
    if mesh.pipeline.rank != 2:  # a stage that did not use its copy in this step has no gradient
        weight.grad = torch.ones_like(weight) * (mesh.pipeline.rank + 5)
    ties.sum_gradients()
    gradient = local(weight.grad).flatten().tolist() if weight.grad is not None else []
    return gradient, sorted(ties.not_owned)


@pytest.mark.parametrize("zero", [False, True])
def test_copies_on_two_stages_share_gradients(zero: bool) -> None:
    results = run_on_ranks(_train_once, 6 if zero else 3, zero)
    step = 2 if zero else 1
    for first, middle, last in zip(
        *(results[i * step : (i + 1) * step] for i in range(3)), strict=True
    ):
        assert first[0] == last[0] == [5.0] * len(first[0])
        assert set(middle[0]) == {6.0}
        assert (first[1], middle[1], last[1]) == ([], [], sorted(TIE.names))


def _two_copies_in_one_process() -> list[list[float]]:
    mesh = start(pipeline=2, data=1, tensor=1)
    parts = [_stage(0), _stage(2)] if mesh.pipeline.rank == 0 else [_stage(2)]
    ties = TiedWeights(mesh, parts, [Tie(TIE.names, (0, 1))])
    weights = [parameter for part in parts for parameter in part.parameters()]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    ties.sum_gradients()
    return [
        sorted(set(weight.grad.flatten().tolist())) for weight in weights if weight.grad is not None
    ]


def test_two_copies_on_one_rank_are_summed_before_the_exchange() -> None:
    assert run_on_ranks(_two_copies_in_one_process, 2) == [[[3.0], [3.0]], [[3.0]]]


def _missing() -> None:
    mesh = start(pipeline=2, data=1, tensor=1)
    with pytest.raises(KeyError, match="none of wte"):
        TiedWeights(mesh, [_stage(1)], [Tie(("wte",), (0, 1))])


def test_a_tie_that_the_stage_does_not_have_is_refused() -> None:
    run_on_ranks(_missing, 2)
