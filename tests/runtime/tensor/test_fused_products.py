"""Inductor can fuse the messages of split sequences with the products beside them.

It replaces a gather and the products that read it, or a product and the reduce-scatter that sums
it, by an op that sends one piece while it multiplies another. Only GPUs have these ops, so the pass
that inserts them is run on the graphs of a layer, and nothing is computed with its result.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed._symmetric_memory import _test_mode

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.collectives import gather, scatter_sum
from tests.runtime.processes import run_on_ranks

FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


class Block(nn.Module):
    """A feed-forward block on one rank: tokens are gathered along a dim, and summed again."""

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__()
        self.axis, self.dim = axis, dim
        self.gate, self.up = (nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result for this rank's tokens."""
        whole = gather(x, self.dim, self.axis)
        inner = torch.sigmoid(self.gate(whole)) * self.up(whole)
        return x + scatter_sum(self.down(inner), self.dim, self.axis)


def fused_in_each_graph(dim: int) -> list[dict[str, int]]:
    """Return how many of each fused op the graphs of forward and backward get."""
    found = []

    def fused(module: fx.GraphModule, _: object) -> Callable[..., Any]:
        copied = fx.GraphModule(module, deepcopy(module.graph))
        view_to_reshape(copied)  # type: ignore[no-untyped-call]
        with _test_mode(), patch.object(dist, "is_nccl_available", lambda: True):
            micro_pipeline_tp_pass(copied.graph)
        names = Counter(str(node.target).split(".")[1] for node in copied.graph.nodes
                        if "symm_mem" in str(node.target))  # fmt: skip
        found.append({name: names[name] for name in FUSED})
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    torch.manual_seed(0)
    axis = Axis(dist.get_rank(), 2, dist.group.WORLD)
    block, x = Block(axis, dim), torch.randn(4, 8, 16, requires_grad=True)
    expected = block(x)
    backend = aot_autograd(
        fw_compiler=fused,
        bw_compiler=fused,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    compiled = torch.compile(block, backend=backend)
    result = compiled(x)
    result.sum().backward()
    torch.testing.assert_close(result, expected)
    return found


@pytest.mark.parametrize("dim", [0, 1])
def test_gathers_and_sums_of_split_tokens_can_be_fused_with_products(dim: int) -> None:
    # the gradient that the backward scatters is a sum of two products, which no op fuses
    forward, backward = dict.fromkeys(FUSED, 1), dict(zip(FUSED, (1, 0), strict=True))
    for graphs in run_on_ranks(fused_in_each_graph, 2, dim):
        assert graphs == [forward, backward]
