"""Which losses can be made in chunks, what they keep, and where the search finds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.costs.layers.chunked_loss import ChunkedLoss, chunked_loss
from autopar.planner.costs.layers.layer import layer_costs
from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.findings.writes import unable
from autopar.planner.graph.layouts import WHOLE, split
from autopar.planner.layers import find_layers
from autopar.planner.plan.declared.constraints import MemoryLimit
from autopar.planner.precision import Precision
from tests.cells import cells
from tests.codegen.plans import pinned_plan
from tests.planner.costs.ops.op_factories import layer_of, pricer, shape, whole
from tests.planner.subjects import family_graph
from tests.planner.trace.model_source import traced

CHUNKED = Recompute.CHUNKED
T, H, V = 4 * 1024, 768, 50257  # of GPT-2 124M, in a microbatch of four rows


def head(precision: Precision = Precision.BF16) -> tuple[LayerCost, LayerCost]:
    """Return the costs of GPT-2's head with its loss: at once, and in chunks."""
    prices = pricer(precision=precision)
    layer = layer_of(prices, "Linear")
    costs = layer_costs(prices, layer, whole(layer), degree=1, shape=shape(1), parameters={})
    return costs[Recompute.NONE], costs[Recompute.CHUNKED]


def test_a_loss_in_chunks_keeps_gradients_in_place_of_logits() -> None:
    # Both keep the hidden states (2 bytes) and the targets (8). At once: the log-probabilities.
    # In chunks: the gradients of the hidden states and of the weight.
    whole_loss, chunked = head()
    assert whole_loss.saved_bytes == 2 * T * H + 8 * T + 2 * T * V
    assert chunked.saved_bytes == 2 * T * H + 8 * T + 2 * T * H + 2 * V * H


def test_an_eighth_of_logits_and_of_what_becomes_of_them_exists_at_a_time() -> None:
    # logits, log-probabilities, and the gradients of both; 2 bytes each
    _, chunked = head()
    assert chunked.transient_bytes == pytest.approx(8 * T * V / 8, rel=1e-3)


def test_each_chunk_adds_its_part_of_the_weights_gradient() -> None:
    # 7 chunks read and write it, and the backward multiplies all gradients: at 1.6 TB/s
    whole_loss, chunked = head()
    moved = 2 * 7 * 2 * V * H + 2 * (2 * V * H + 2 * T * H)
    more = chunked.backward_seconds - whole_loss.backward_seconds
    assert more == pytest.approx(chunked.recompute_seconds)
    assert more == pytest.approx(moved / 1.6e12, rel=0.1)
    assert chunked.forward_seconds == whole_loss.forward_seconds


def test_a_head_that_takes_its_shard_of_a_whole_weight_has_the_loss_at_once() -> None:
    # its forward cuts the weight, and chunks would multiply by all of it
    prices = pricer()
    layer = layer_of(prices, "Linear")
    (head,) = (op for op in layer.ops if op.target.startswith("aten.linear"))
    weight = head.inputs[1]
    vocab = prices.axes.dims[weight][0]
    part = split(getattr(vocab, "name", ""), 0)
    layouts = [
        replace(one, needs=(one.needs[0], part)) if op is head else one
        for op, one in zip(layer.ops, whole(layer), strict=True)
    ]
    for own, is_chunked in ((part, True), (WHOLE, False)):
        costs = layer_costs(
            prices, layer, layouts, degree=2, shape=shape(2), parameters={weight: own}
        )
        saved = costs[CHUNKED].saved_bytes
        assert (saved != costs[Recompute.NONE].saved_bytes) is is_chunked


def test_fp16_has_the_loss_at_once() -> None:
    whole_loss, chunked = head(Precision.FP16)
    assert chunked == whole_loss


MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.other = nn.Parameter(torch.ones(11, 8))

    def forward(self, x, y):
        x = self.norm(self.table(x))
        {body}

def build_model():
    return Model()

def example_batch(batch_size):
    x = torch.randint(11, (batch_size, 6))
    return {{"x": x, "y": x}}
"""
FLAT = "return F.cross_entropy(l.flatten(0, 1), y.flatten())"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"l = self.head(x); {FLAT}", ""),
        ("l = self.head(x).float(); return F.cross_entropy(l.view(-1, 11), "
         "F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1))", ""),
        ("l = self.head(x)[..., :-1, :].contiguous(); "
         "return F.cross_entropy(l.view(-1, 11), y[..., 1:].contiguous().view(-1))", ""),
        (f"l = torch.tanh(self.head(x) / 3) * 3; {FLAT}", ""),
        ("l = self.head(x) / 3; return l.mean() + F.cross_entropy(l.flatten(0, 1), y.flatten())",
         "row by row"),
        (f"l = F.linear(x, self.other); {FLAT}", "not the only op of a module"),
        (f"l = self.head(x).softmax(-1); {FLAT}", "row by row"),
        (f"l = self.head(x) + self.head(-x); {FLAT}", "row by row"),
        ("l = self.head(x); return F.cross_entropy(l.transpose(1, 2), y)", "row by row"),
        ("l = self.head(x); "
         "return F.cross_entropy(l.flatten(0, 1), y.flatten(), reduction='none').mean()",
         "row by row"),
    ],
)  # fmt: skip
def test_logits_that_only_a_loss_reads_row_by_row_can_be_made_in_chunks(
    body: str, why: str, tmp_path: Path
) -> None:
    graph = traced(tmp_path, MODEL.format(body=body))
    found = chunked_loss(find_layers(graph, infer_axes(graph)).layers[-1].ops, graph)
    if why:
        assert not isinstance(found, ChunkedLoss)
        assert why in found.why
    else:
        assert isinstance(found, ChunkedLoss)
        assert found.ops[0].target.startswith("aten.linear")


@pytest.mark.parametrize(
    ("name", "path"),
    cells(
        (
            *(("Llama", "lm_head"), ("Gemma2", "lm_head"), ("GPT-2", "lm_head")),
            *(("T5", "lm_head"), ("Whisper", "proj_out")),
        ),
        (("Gemma2", "lm_head"),),  # its logits are capped
    ),
)
def test_losses_of_hugging_face_can_be_made_in_chunks(name: str, path: str) -> None:
    graph = family_graph(name)
    layers = find_layers(graph, infer_axes(graph)).layers
    unables = unable(layers, graph, precision=Precision.BF16)
    can = [layer for layer, modes in zip(layers, unables, strict=True) if CHUNKED not in modes]
    assert [graph.calls[layer.call].path for layer in can] == [path]


@pytest.mark.parametrize(("memory_mib", "is_chunked"), [(70_000, False), (3000, True)])
def test_the_search_takes_chunks_where_memory_is_short(memory_mib: int, is_chunked: bool) -> None:
    shape = ("layers=2", "dim=128", "heads=4", "ffn=256", "vocab_size=65536", "seq_len=512")
    plan = pinned_plan(
        "llama.py",
        shape,
        device="a100-80gb",
        precision=Precision.BF16,
        microbatch=8,
        memory=MemoryLimit(size_bytes=memory_mib * 2**20),
    )
    assert (Recompute.CHUNKED in plan.layer_modes) == is_chunked
