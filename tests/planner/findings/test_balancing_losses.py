"""Experts of transformers that are balanced by a loss keep data parallelism, in fp32 as well."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from autopar.planner.axes.infer import infer_axes
from autopar.planner.findings.loss import Follows, loss_of_parts
from autopar.planner.findings.rows import meeting_rows
from autopar.planner.graph.graph import Graph
from autopar.planner.inspection import unpriced
from autopar.planner.model.model_file import ModelFile
from autopar.planner.trace import trace


@cache
def mixtral(*, has_mask: bool) -> Graph:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, use_cache=False,
    )  # fmt: skip

    def batch(rows: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 32, (rows, 6))
        mask = {"attention_mask": torch.ones_like(ids)} if has_mask else {}
        return {"input_ids": ids, "labels": ids.clone(), **mask}

    return trace(ModelFile(
        path=Path("mixtral.py"), factory="build_model", arguments=(),
        build_model=lambda: MixtralForCausalLM(config), example_batch=batch, loss=None,
        build_dataset=None, build_optimizer=None, build_scheduler=None,
    ))  # fmt: skip


@pytest.mark.parametrize("has_mask", [False, True])
def test_balanced_experts_are_split_over_data_ranks(*, has_mask: bool) -> None:
    graph = mixtral(has_mask=has_mask)
    assert graph.fixed_batch is None
    assert meeting_rows(graph) is None
    assert loss_of_parts(graph).follows is Follows.NEARLY


@pytest.mark.parametrize("has_mask", [False, True])
def test_products_by_groups_of_a_noticed_trace_have_a_formula(*, has_mask: bool) -> None:
    graph = mixtral(has_mask=has_mask)
    assert not [one for one in unpriced(graph, infer_axes(graph)) if "grouped" in one.target]
