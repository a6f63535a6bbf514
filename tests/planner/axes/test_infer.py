"""The axes that inference finds are those that the modelling code shows."""

import pytest

from autopar.planner.axes.infer import infer_axes
from tests.cells import cells
from tests.planner.huggingface.expectation import accepts
from tests.planner.huggingface.expectations import EXPECTATIONS
from tests.planner.huggingface.families import FAMILIES
from tests.planner.subjects import ZOO_MODELS, family_graph, zoo_graph

STAND = ("GPT-2", "Llama", "Falcon (multi-query)", "Mamba", "T5", "ViT", "Swin")


@pytest.mark.parametrize("family", cells([family.name for family in FAMILIES], STAND))
def test_every_family_has_its_axes_on_the_right_parameters(family: str) -> None:
    graph = family_graph(family)
    axes = infer_axes(graph)
    wrong = [
        (expectation.parameter, expectation.dim, expectation.structure, found)
        for expectation in EXPECTATIONS[family]
        if not accepts(
            expectation, found := axes.text(axes.dims[expectation.parameter][expectation.dim])
        )
    ]
    assert not wrong
    assert not axes.conflicts


@pytest.mark.parametrize("model", ZOO_MODELS)
def test_the_axes_of_the_zoo_agree_everywhere(model: str) -> None:
    assert not infer_axes(zoo_graph(model)).conflicts


def test_a_fused_projection_is_a_concatenation_of_head_products() -> None:
    graph = zoo_graph("gpt2.py")
    axes = infer_axes(graph)
    fused = axes.text(axes.dims["h.0.attn.c_attn.weight"][0])
    assert fused == "[heads·head_dim | heads·head_dim | heads·head_dim]"


def test_grouped_queries_are_a_product_of_key_heads_and_group() -> None:
    axes = infer_axes(zoo_graph("llama.py"))
    query = axes.text(axes.dims["layers.0.self_attn.q_proj.weight"][0])
    key = axes.text(axes.dims["layers.0.self_attn.k_proj.weight"][0])
    assert (query, key) == ("kv_heads·group·head_dim", "kv_heads·head_dim")
