"""The strategies of an op are those that its rule and its arguments allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.graph.layouts import PARTIAL, REPLICATED, WHOLE, LayoutKind, OpLayout
from autopar.planner.graph.ops import Op
from autopar.planner.programs.layouts.strategies import strategies
from autopar.planner.rules.signature import Leaf
from tests.planner.subjects import zoo_graph
from tests.planner.trace.model_source import linear_model, ops_of, traced

ATTENTION = "aten.scaled_dot_product_attention.default"


def _of(model: str, target: str, *, nth: int = 0, degree: int = 2) -> tuple[list[str], Op]:
    """Return an op's strategies as people read them: `seq: S R R -> S`."""
    graph = zoo_graph(model)
    axes = infer_axes(graph)
    op = [op for op in graph.ops if op.target == target][nth]
    found = strategies(op, graph, axes, degree=degree, batch=4)

    def text(own: OpLayout) -> str:
        sides = (" ".join(layout.kind.value for layout in side) for side in (own.needs, own.gives))
        return f"{axes.names.get(own.axis, '')}: {' -> '.join(sides)}"

    return [text(own) for own in found], op


def test_a_linear_layer_has_megatron_s_two_ways_among_its_own() -> None:
    found, _ = _of("gpt2.py", "aten.linear.default", nth=2)
    assert found == [
        ": I I I -> I",
        ": R R R -> R",
        ": P R P -> P",
        "batch: S R R -> S",
        "seq: S R R -> S",
        "embed: S S P -> P",
        "ffn: R S S -> S",
    ]


def test_a_causal_attention_is_not_split_along_its_queries() -> None:
    causal, _ = _of("gpt2.py", ATTENTION)
    free, _ = _of("t5.py", ATTENTION)
    assert not any(text.startswith("seq:") for text in causal)
    assert "heads: S S S -> S" in causal
    assert "seq: S R R S -> S" in free


def test_grouped_queries_are_split_by_key_heads_or_inside_of_a_group() -> None:
    found, _ = _of("llama.py", ATTENTION)
    assert "kv_heads: S S S -> S" in found
    assert "group: S R R -> S" in found


def test_a_mean_loss_is_split_over_the_vocabulary_alone() -> None:
    found, _ = _of("gpt2.py", "aten.cross_entropy_loss.default")
    assert found == [": I I -> I", ": R I -> R", "vocab: S I -> I"]


def test_a_log_of_a_sum_of_exponentials_is_whole_over_a_split_dim_and_a_maximum_is_not_split(
    tmp_path: Path,
) -> None:
    graph = traced(
        tmp_path, linear_model("x = self.linear(x)", "return x.logsumexp(1) + x.amax(1)")
    )
    axes = infer_axes(graph)
    (log_sum,), (highest,) = ops_of(graph, "logsumexp"), ops_of(graph, "amax")
    features = axes.dims[log_sum.inputs[0]][1]
    assert isinstance(features, Leaf)

    def over_features(op: Op) -> list[OpLayout]:
        found = strategies(op, graph, axes, degree=2, batch=4)
        return [own for own in found if own.axis == features.name]

    (own,) = over_features(log_sum)
    assert [layout.kind for layout in own.needs] == [LayoutKind.SPLIT]
    assert own.gives == (WHOLE,)
    assert not over_features(highest)


def test_batch_statistics_are_not_split_over_the_batch() -> None:
    found, _ = _of("resnet.py", "aten.batch_norm.default")
    assert found == [": I I I I I -> I", ": R R R I I -> R", "channels: S S S S S -> S"]


def test_bags_are_split_by_rows_of_their_table_and_by_columns() -> None:
    found, _ = _of("intent.py", "aten.embedding_bag.padding_idx")
    assert {one for one in found if not one.startswith(":")} == {
        "vocab: S I I -> P I I I",
        "embed: S I I -> S I I I",
    }


@pytest.mark.parametrize("degree", [2, 8])
def test_an_axis_has_a_position_for_every_rank(degree: int) -> None:
    found, _ = _of("gpt2.py", ATTENTION, degree=degree)
    assert ("heads: S S S -> S" in found) == (degree <= 4)


@pytest.mark.parametrize("model", ["gpt2.py", "llama.py", "t5.py", "resnet.py", "vit.py"])
def test_only_tensors_with_gradients_are_replicated_or_partial_inputs(model: str) -> None:
    graph = zoo_graph(model)
    axes = infer_axes(graph)
    for op in graph.ops:
        for own in strategies(op, graph, axes, degree=2, batch=4):
            for name, need in zip(op.inputs, own.needs, strict=True):
                assert need != REPLICATED or graph.tensors[name].requires_grad
            assert own.axis or {x.kind for x in own.needs} <= {
                LayoutKind.WHOLE, LayoutKind.REPLICATED, LayoutKind.PARTIAL
            }  # fmt: skip
            assert len({WHOLE, PARTIAL} & set(own.gives)) < 2


def test_one_number_of_each_row_is_split_over_the_rows(tmp_path: Path) -> None:
    body = "return F.normalize(self.linear(x), dim=-1)"
    graph = traced(tmp_path, linear_model(body))
    axes = infer_axes(graph)
    (clamp,) = ops_of(graph, "clamp_min")  # of which a rule knows no more than of any op's batch
    found = strategies(clamp, graph, axes, degree=2, batch=4)
    assert {axes.names.get(own.axis, "") for own in found} == {"", "batch"}


def test_an_op_that_its_rule_does_not_know_so_is_not_split(tmp_path: Path) -> None:
    body = "return torch.diff(self.linear(x), prepend=x[:, :1])"
    graph = traced(tmp_path, linear_model(body))
    (diff,) = ops_of(graph, "diff")
    found = strategies(diff, graph, infer_axes(graph), degree=2, batch=4)
    assert {own.axis for own in found} == {""}
