"""A check that can do nothing but raise is taken as passed; a decision is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from tests.planner.trace.model_source import linear_model, ops_of, traced


@pytest.mark.parametrize(
    "check",
    [
        "assert torch.all(x < 9).item(), 'too much'",
        "assert (x < 9).all()",
        "assert not (x > 9).any()",
        "if x.max() >= 9: raise ValueError('too much')",
        "if x is None or x.max() >= 9: raise ValueError('too much')",
        "if not (x < 9).all(): raise ValueError('too much')",
        "torch.distributions.Normal(x, x.abs() + 1)",
    ],
)
def test_a_check_is_taken_as_passed(tmp_path: Path, check: str) -> None:
    assert traced(tmp_path, linear_model(check, "return self.linear(x)")).fixed_batch is None


@pytest.mark.parametrize(
    "decision",
    [
        "x = x + 1 if x.max() >= 9 else x",
        "if x.max() >= 9: x = x + 1",
        "if x.max() < 9 and not x.min() < 0: raise ValueError",
    ],
)
def test_a_decision_on_values_is_refused(tmp_path: Path, decision: str) -> None:
    with pytest.raises(TraceError, match="decides on the values"):
        traced(tmp_path, linear_model(decision, "return self.linear(x)"))


@pytest.mark.parametrize(
    "decision",
    [
        "if torch.rand([]) < 0.1: x = x + 1",
        "if torch.rand(1, device=x.device).mul(2) < 0.1: x = x + 1",
        "if torch.empty(1).uniform_() < 0.1: x = x + 1",
    ],
)
def test_a_decision_at_random_is_told_as_such(tmp_path: Path, decision: str) -> None:
    with pytest.raises(TraceError, match="decides by a random number") as told:
        traced(tmp_path, linear_model(decision, "return self.linear(x)"))
    assert "the probability of dropping layers" in told.value.fix
    assert decision.partition(":")[0] in told.value.found


TRANSFORMER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(4, 2, 8, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x):
        x = x.unsqueeze(1).expand(-1, 3, -1)
        mask = {mask}
        return self.decoder(x, x, tgt_mask=mask)

def build_model():
    return Model()
"""


@pytest.mark.parametrize("device", ["", ", device=x.device"])
def test_a_mask_that_is_causal_is_known_as_such(tmp_path: Path, device: str) -> None:
    mask = f"nn.Transformer.generate_square_subsequent_mask(3{device})"
    graph = traced(tmp_path, TRANSFORMER.format(mask=mask))
    first, *_ = ops_of(graph, "scaled_dot_product_attention")
    arguments = dict(first.arguments)
    assert arguments["is_causal"]
    assert arguments["attn_mask"] is None


@pytest.mark.parametrize("mask", ["x[0, 0, 0] * torch.ones(3, 3)", "torch.eye(3)"])
def test_a_mask_that_may_not_be_causal_is_kept(tmp_path: Path, mask: str) -> None:
    graph = traced(tmp_path, TRANSFORMER.format(mask=mask))
    first, *_ = ops_of(graph, "scaled_dot_product_attention")
    arguments = dict(first.arguments)
    assert arguments["attn_mask"] is not None
    assert not arguments["is_causal"]


def test_a_check_passes_where_a_model_cannot_be_traced_without_a_device(tmp_path: Path) -> None:
    at_the_cpu = "x = x.masked_fill(x > 9, torch.tensor(0.0))"
    source = linear_model(f"assert (x < 9).all(); {at_the_cpu}", "return self.linear(x)")
    assert len(ops_of(traced(tmp_path, source), "masked_fill")) == 1
