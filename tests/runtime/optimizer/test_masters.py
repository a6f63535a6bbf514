"""The fp32 masters of a 16-bit training hold what the constructor or a file has, to the bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from autopar.codegen.proof.comparison import RankBlock, RankBlocks, assembled
from autopar.runtime.checkpointing.owners import local_weights
from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.model.parts import shard_parameters
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.pieces import local_tensor
from autopar.runtime.ranks.mesh import start
from autopar.runtime.ranks.options import StartingWeights
from autopar.runtime.tensor.shards import Split
from autopar.runtime.weights.initial_weights import record
from autopar.runtime.weights.loading import load_weights
from autopar.runtime.weights.plain_model import plain_model
from tests.cells import cells
from tests.runtime.processes import run_on_ranks

HALF = torch.bfloat16
SPLITS = {"0.weight": Split(0, ((6, 1),)), "0.bias": Split(0, ((6, 1),))}


def net(built: str = "float32", frozen: bool = False) -> nn.Sequential:
    """Return layers of which the last reads the first one's weight, too."""
    layers = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 6))
    nn.init.uniform_(layers[1].weight)  # type: ignore[arg-type]
    layers[3].weight = layers[0].weight
    layers[2].requires_grad_(not frozen)
    return layers.to(getattr(torch, built))


class Noticing(AdamW):
    """Keeps what the parameters are when it is built, as optimizers that average weights do."""

    def __init__(self, parameters: Any) -> None:
        every = list(parameters)
        super().__init__(every, lr=0.0)
        for one in every:
            self.state[one]["first"] = one.detach().clone()


def begun(
    zero: int, built: str, file: Path | None, tensor: int
) -> tuple[RankBlocks, RankBlocks, set[torch.dtype]]:
    """Return what the optimizer has, what it kept as it was built, and the parameters' types."""
    mesh = start(pipeline=1, data=2 // tensor, tensor=tensor)
    model, recipe = record(lambda: net(built), seed=3)
    splits = SPLITS if tensor > 1 else {}
    shard_parameters(model, splits, mesh.tensor)
    wrap(model, mesh, zero=zero, compute_dtype=HALF, bucket_bytes=200, units=list(model.children()))
    starting = None if file is None else StartingWeights(files=file)
    load_weights([model], recipe, starting, mesh, splits=splits)
    optimizer = build_optimizer([model], Noticing, zero=zero, mesh=mesh)
    masters = [
        RankBlock(h.key, h.chunks, h.tensor.double()) for h in local_weights([model], optimizer)
    ]
    return masters, _first(model, optimizer), {one.dtype for one in model.parameters()}


def _first(model: nn.Module, optimizer: Optimizer) -> RankBlocks:
    """Return what the optimizer kept of each parameter, in the place of its value."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            first = optimizer.state[one]["first"]
            one.data.copy_(local_tensor(first) if first.shape == one.shape else first)
    return [
        RankBlock(h.key, h.chunks, h.tensor.double()) for h in local_weights([model], optimizer)
    ]


def saved(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Save other fp32 weights than the constructor's."""
    model = plain_model(net, seed=4)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors", weights


WAYS = [(zero, 1) for zero in range(4)] + [(0, 2)]
CASES = [(*way, built) for way, built in product(WAYS, ("float32", "bfloat16", "a file"))]
STAND = [(0, 1, "float32"), (1, 1, "a file"), (3, 1, "bfloat16"), (0, 2, "a file")]


@pytest.mark.parametrize(("zero", "tensor", "source"), cells(CASES, STAND))
def test_masters_begin_with_the_numbers_of_their_source(
    zero: int, tensor: int, source: str, tmp_path: Path
) -> None:
    file, expected = saved(tmp_path) if source == "a file" else (None, {})
    built = "bfloat16" if source != "float32" else "float32"
    if file is None:
        expected = dict(plain_model(lambda: net(built), seed=3).named_parameters())
    ranks = run_on_ranks(begun, 2, zero, built, file, tensor)
    for held in ([one[0] for one in ranks], [one[1] for one in ranks]):
        found = assembled(held)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.detach().double()), name
    assert ranks[0][2] == {torch.float32 if zero == 3 else HALF} or zero == 2
    assert any(not torch.equal(one, one.to(HALF).to(one)) for one in expected.values()) == (
        source != "bfloat16"
    )
