"""What a model chooses by itself is traced as if it did not, and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from tests.planner.trace.model_source import line_of, ops_of, traced

MODEL = """
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), Stack(*[Block() for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        {body}
        return x

def build_model():
    return Model()
"""
BLOCKS = "for block in self.blocks: x = {}"


def with_body(body: str) -> str:
    return MODEL.replace("{body}", body)


@pytest.mark.parametrize(
    "body",
    [
        BLOCKS.format("checkpoint(block, x, use_reentrant=False)"),
        BLOCKS.format("checkpoint(block, x, use_reentrant=True)"),
        "x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)",
    ],
)
def test_what_a_model_checkpoints_is_traced_as_without(tmp_path: Path, body: str) -> None:
    plain = traced(tmp_path, with_body(BLOCKS.format("block(x)")))
    assert not plain.recomputed_at
    found = traced(tmp_path, with_body(body))
    assert [op.target for op in found.ops] == [op.target for op in plain.ops]
    grads = [found.tensors[name].requires_grad for op in found.ops for name in op.outputs]
    assert all(grads)
    line = line_of(tmp_path / "subject.py", "self.blocks: x =" if "for" in body else body)
    assert found.recomputed_at == f"{tmp_path / 'subject.py'}:{line}"


@pytest.mark.parametrize("region", ["with torch.inference_mode():", "with torch.no_grad():"])
def test_a_region_of_inference_is_one_without_gradients(tmp_path: Path, region: str) -> None:
    body = f"""y = x
        {region}
            y = self.blocks(y)
        x = x + y.clone()"""
    graph = traced(tmp_path, with_body(body))
    inside = [op for op in graph.ops if op.call.startswith("blocks")]
    assert len(inside) == 12
    assert not any(op.grad_enabled for op in inside)
    assert not any(graph.tensors[name].requires_grad for op in inside for name in op.outputs)
    (clone,) = ops_of(graph, "clone")
    assert clone.grad_enabled


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_precision_of_the_models_own_is_told_if_it_is_one(
    tmp_path: Path, is_enabled: bool
) -> None:
    body = f"""with torch.autocast("cpu", torch.bfloat16, enabled={is_enabled}):
            for block in self.blocks:
                x = block(x)"""
    graph = traced(tmp_path, with_body(body))
    assert len(ops_of(graph, "linear")) == 7
    assert bool(graph.autocast_at) == is_enabled


@pytest.mark.parametrize(
    ("places", "meet"), [("torch.arange(4.0)", True), ("torch.arange(4.0, device=x.device)", False)]
)
def test_tensors_that_a_gpu_would_not_take_are_told(
    tmp_path: Path, places: str, *, meet: bool
) -> None:
    body = f"""for block in self.blocks:
            x = block(x)
        x = x + {places}"""
    place = traced(tmp_path, with_body(body)).devices_meet_at
    line = line_of(tmp_path / "subject.py", places)
    assert place.startswith(f"{tmp_path / 'subject.py'}:{line}") if meet else not place


def test_flex_attention_is_refused_by_its_name(tmp_path: Path) -> None:
    body = """from torch.nn.attention.flex_attention import flex_attention
        y = x.view(x.shape[0], 1, 2, 2)
        x = flex_attention(y, y, y).flatten(1)"""
    with pytest.raises(TraceError, match="flex_attention, which has no plain graph"):
        traced(tmp_path, with_body(body))
