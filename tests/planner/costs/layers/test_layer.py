"""Tests of what one layer costs, keeps and holds, in three recompute modes."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from autopar.planner.annotate import annotate, state_of, total_work
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Collective
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.layers.flow import UNSHARED, SharedWeights, layer_flow, recomputed_ops
from autopar.planner.costs.layers.layer import layer_costs
from autopar.planner.costs.ops.measurements import HostTimes, OpKey, Timing
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.graph.layouts import REPLICATED
from autopar.planner.layers import Layer
from autopar.planner.plan.solving.costing import parameters_of
from autopar.planner.precision import Precision
from tests.planner.costs.ops.op_factories import (
    GPT2,
    device,
    known,
    layer_of,
    megatron,
    op_of,
    pricer,
    shape,
    weights,
    whole,
)
from tests.planner.subjects import ZOO_MODELS
from tests.planner.trace.model_source import traced

S, B, H, A = 1024, 4, 768, 12
SBH = S * B * H
LOG_SUM_EXP, STATISTICS = 4 * A * S * B, 2 * 2 * 4 * S * B  # two norms, mean and deviation in fp32


def alone(
    prices: OpPricer, layer: Layer, shared: SharedWeights = UNSHARED
) -> Mapping[Recompute, LayerCost]:
    """Return a layer's costs where nothing is split."""
    return layer_costs(
        prices, layer, whole(layer), degree=1, shape=shape(1), parameters={}, shared=shared
    )


def in_two(prices: OpPricer, layer: Layer) -> Mapping[Recompute, LayerCost]:
    """Return a layer's costs under Megatron's layouts on two ranks."""
    layouts = megatron(prices, layer)
    return layer_costs(
        prices, layer, layouts, degree=2, shape=shape(2), parameters=weights(layer, layouts, prices)
    )


@pytest.mark.parametrize("case", [*[(name,) for name in ZOO_MODELS], GPT2], ids=" ".join)
def test_all_layers_together_keep_what_the_annotation_says(case: tuple[str, ...]) -> None:
    graph, axes, layers = known(*case)
    prices = pricer(*case)
    kept = sum(alone(prices, layer)[Recompute.NONE].saved_bytes for layer in layers.layers)
    annotation = annotate(graph, axes, batch=4, precision=Precision.BF16)
    assert kept == total_work(graph.ops, annotation).saved_bytes


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_tied_parameters_are_held_once(name: str) -> None:
    graph, _, layers = known(name)
    prices = pricer(name)
    counted: frozenset[str] = frozenset()
    held = gradients = states = 0
    for layer in layers.layers:
        cost = alone(prices, layer, SharedWeights(counted=counted))[Recompute.NONE]
        counted |= {n for op in layer.ops for n in op.inputs if n in prices.parameters}
        held += cost.parameter_bytes
        gradients += cost.gradient_bytes
        states += cost.optimizer_bytes
    state = state_of(graph.parameters, Precision.BF16)
    assert (held, gradients, states) == (
        state.parameter_bytes,
        state.gradient_bytes,
        state.optimizer_bytes,
    )


def test_a_gpt_block_with_flash_attention_keeps_34_bytes_per_position() -> None:
    # Korthikanti et al. 2022, equation 1, s·b·h·(34 + 5·a·s/h), without the 5·a·s²·b of scores:
    # the norms' inputs 4, qkv's input 2, q, k, v 6, the projection's input 2, a mask 1, the first
    # product's input 2, gelu's 8, the second product's 8, a mask 1.
    prices = pricer()
    cost = alone(prices, layer_of(prices, "Block"))[Recompute.NONE]
    assert cost.saved_bytes == 34 * SBH + LOG_SUM_EXP + STATISTICS


def test_recompute_keeps_the_results_of_products_or_the_input_alone() -> None:
    # Selective: the block's input 2, qkv's result 6, the attention's 2, the projection's 2, the
    # first product's 8, the second's 2. Full: the input.
    prices = pricer()
    costs = alone(prices, layer_of(prices, "Block"))
    assert costs[Recompute.SELECTIVE].saved_bytes == 22 * SBH + LOG_SUM_EXP
    assert costs[Recompute.FULL].saved_bytes == 2 * SBH


def test_what_is_computed_again_lives_while_the_layer_runs_backward() -> None:
    # The largest op is a product between 768 and 3072 or gelu: 2·(4 + 4) · sbh for gelu's two
    # gradients. Full: of the 34 · sbh, the 2 of the input are there anyway.
    prices = pricer()
    costs = alone(prices, layer_of(prices, "Block"))
    assert costs[Recompute.NONE].transient_bytes == 16 * SBH
    again = 34 * SBH + LOG_SUM_EXP + STATISTICS - 2 * SBH
    assert costs[Recompute.FULL].transient_bytes == 16 * SBH + again


def test_full_recompute_adds_the_forward_and_selective_only_the_cheap_ops() -> None:
    prices = pricer(batch=32)  # so many rows that the device is busy all the time
    layer = layer_of(prices, "Block")
    none, selective, full, *_ = (alone(prices, layer)[mode] for mode in Recompute)
    assert none.recompute_seconds == 0
    last = prices.cost(op_of(prices, layer, "add", 1)).forward_seconds  # no backward needs it
    assert full.recompute_seconds == pytest.approx(none.forward_seconds - last)
    again = full.backward_seconds - none.backward_seconds
    assert again == pytest.approx(full.recompute_seconds)
    # for the inputs of the products and of gelu, and for the masks; the last sum is not needed
    kinds = ["layer_norm", "layer_norm", "dropout", "dropout", "add", "gelu"]
    cheap = sum(
        prices.cost(op_of(prices, layer, kind, number)).forward_seconds
        for kind, number in zip(kinds, [0, 1, 0, 1, 0, 0], strict=True)
    )
    assert selective.recompute_seconds == pytest.approx(cheap)
    assert selective.recompute_seconds < 0.3 * full.recompute_seconds


def test_seconds_are_sums_over_ops_where_the_device_is_busy() -> None:
    prices = pricer(batch=32)
    layer = layer_of(prices, "Block")
    cost = alone(prices, layer)[Recompute.NONE]
    ops = [prices.cost(op) for op in layer.ops]
    assert cost.forward_seconds == pytest.approx(sum(op.forward_seconds for op in ops))
    assert cost.backward_seconds == pytest.approx(sum(op.backward_seconds for op in ops))
    assert cost.communication_seconds == 0


def test_a_small_layer_takes_as_long_as_the_host_takes_to_dispatch_it() -> None:
    prices = pricer("gpt2.py", batch=1)
    layer = layer_of(prices, "Block")
    cost = alone(prices, layer)[Recompute.NONE]
    assert cost.forward_seconds == pytest.approx(len(layer.ops) * prices.host.forward_seconds)


def test_a_layer_that_runs_again_is_dispatched_again_but_for_its_end() -> None:
    prices = pricer("gpt2.py", "dropout=0.0", batch=1, device_name="cpu")
    layer = layer_of(prices, "Block")
    full = alone(prices, layer)[Recompute.FULL]
    ends = [prices.cost(op).forward_seconds for op in layer.ops[-2:]]  # the product, the sum
    spared = sum(ends) + len(ends) * prices.host.forward_seconds
    assert full.recompute_seconds == pytest.approx(full.forward_seconds - spared)


def test_a_host_that_runs_ahead_hides_what_selective_recompute_costs_it() -> None:
    prices = pricer("gpt2.py", batch=1, device_name="a100")
    costs = alone(prices, layer_of(prices, "Block"))
    plain, selective, full, *_ = costs.values()
    assert selective.forward_seconds == plain.forward_seconds
    assert 0 < selective.recompute_seconds < full.recompute_seconds


@pytest.mark.parametrize(
    ("device_name", "dropout", "runs_again"),
    [("a100", 0.1, False), ("cpu", 0.1, True), ("cpu", 0.0, False)],
)
def test_selective_recompute_makes_attention_again_where_dropout_takes_it_apart(
    device_name: str, dropout: float, runs_again: bool
) -> None:
    prices = pricer("gpt2.py", f"dropout={dropout}", device_name=device_name)
    layer = layer_of(prices, "Block")
    attention = op_of(prices, layer, "scaled_dot_product_attention")
    flow = layer_flow(
        prices, layer, whole(layer), degree=1, shape=shape(1), parameters={}, outside={}
    )
    again = recomputed_ops(flow, Recompute.SELECTIVE)
    assert (attention in [one.op for one in again.ops]) == runs_again


def test_megatron_all_reduces_twice_forward_and_twice_backward() -> None:
    prices = pricer(batch=32)
    layer = layer_of(prices, "Block")
    cost = in_two(prices, layer)[Recompute.NONE]
    payload = 32 * S * H * 2
    once = collective_seconds(Collective.ALL_REDUCE, payload, shape(2))
    assert cost.communication_seconds == pytest.approx(4 * once)
    again = in_two(prices, layer)[Recompute.FULL]
    assert again.communication_seconds == pytest.approx(6 * once)


def test_tensor_parallelism_halves_what_lies_between_the_products() -> None:
    # Korthikanti et al., section 4.2.1: s·b·h·(10 + 24 ÷ t) without scores
    prices = pricer()
    cost = in_two(prices, layer_of(prices, "Block"))[Recompute.NONE]
    assert cost.saved_bytes == (10 + 24 // 2) * SBH + LOG_SUM_EXP // 2 + STATISTICS


def test_a_split_layer_holds_half_of_its_matrices() -> None:
    prices = pricer()
    layer = layer_of(prices, "Block")
    full, half = (costs[Recompute.NONE] for costs in (alone(prices, layer), in_two(prices, layer)))
    # norms 4·768 and the biases of both projections 2·768 are on both ranks
    assert full.parameters == 12 * H * H + 13 * H
    assert half.parameters == 6 * H * H + 3 * H // 2 + 4 * H // 2 + 6 * H
    assert half.parameter_bytes == 2 * half.parameters
    assert half.gradient_bytes == 4 * half.trainable
    assert half.optimizer_bytes == 12 * half.trainable


def test_gradients_of_replicated_parameters_are_told() -> None:
    prices = pricer()
    layer = layer_of(prices, "Block")
    norm = op_of(prices, layer, "layer_norm")
    replicated = dict.fromkeys(norm.inputs[1:], REPLICATED)
    cost = layer_costs(
        prices, layer, whole(layer), degree=2, shape=shape(2), parameters=replicated
    )[Recompute.NONE]
    assert cost.replicated_gradient_bytes == 4 * 2 * H


def test_only_the_residual_stream_crosses_behind_a_block() -> None:
    prices = pricer()
    cost = alone(prices, layer_of(prices, "Block"))[Recompute.NONE]
    assert cost.output_bytes == 2 * SBH
    assert alone(prices, prices.layers.layers[-1])[Recompute.NONE].output_bytes == 0


def test_the_loss_needs_its_logits_gradient_twice() -> None:
    # logits' gradient and their log-probabilities', both in bf16, and the loss itself
    prices = pricer()
    cost = alone(prices, prices.layers.layers[-1])[Recompute.NONE]
    assert cost.transient_bytes == B * S * 50257 * (2 + 2) + 2


def test_the_heads_gradient_comes_when_the_loss_has_freed_what_it_kept() -> None:
    # The gradients of the logits and of their input in bf16, less the log-probabilities that the
    # loss kept in bf16.
    prices = pricer()
    cost = alone(prices, prices.layers.layers[-1])[Recompute.NONE]
    assert cost.learned_gradient_bytes == 4 * 50257 * H
    assert cost.learning_bytes == pytest.approx(
        B * S * (2 * 50257 + 2 * H - 2 * 50257), abs=8 * B * S
    )


def test_a_shared_weight_has_a_gradient_that_waits_from_its_last_layer_to_its_first() -> None:
    prices = pricer()
    layers = prices.layers.layers
    embedding, head = layers[0], layers[-1]
    tied = frozenset({"wte.weight"})
    assert tied <= parameters_of(embedding, prices.parameters)
    assert tied <= parameters_of(head, prices.parameters)
    waits = SharedWeights(waiting=tied)
    for layer, shared, expected in (
        (embedding, waits, 1), (layers[1], waits, 1), (head, SharedWeights(counted=tied), 0),
    ):  # fmt: skip
        cost = alone(prices, layer, shared)[Recompute.NONE]
        assert cost.waiting_gradient_bytes == expected * 4 * 50257 * H


def test_a_weight_that_two_stages_share_is_sent_whole() -> None:
    prices = pricer()
    head, tied = prices.layers.layers[-1], frozenset({"wte.weight"})
    apart, shared = (
        alone(prices, head, SharedWeights(tied=one))[Recompute.NONE] for one in (frozenset(), tied)
    )
    assert (apart.whole_gradient_bytes, shared.whole_gradient_bytes) == (0, 4 * 50257 * H)
    thin = 4 * 4 * (50257 + H)  # as PowerSGD sends a matrix
    assert apart.thin_gradient_bytes - shared.thin_gradient_bytes == thin
    assert apart.replicated_gradient_bytes == shared.replicated_gradient_bytes == 0


def test_measured_seconds_are_told_apart() -> None:
    formula = pricer()
    layer = layer_of(formula, "Block")
    key = formula.key(op_of(formula, layer, "gelu"))
    prices = pricer(measured=Measured(key))
    costs = alone(prices, layer)
    assert costs[Recompute.NONE].measured_seconds == 3.0
    assert costs[Recompute.FULL].measured_seconds == 4.0  # the forward runs twice


class Measured:
    """A profile of one op."""

    def __init__(self, key: OpKey) -> None:
        self.key = key

    def seconds(self, key: OpKey) -> Timing | None:
        timing = Timing(forward_seconds=1.0, backward_seconds=2.0)
        return timing if key == self.key else None

    def host(self, device: str) -> HostTimes | None:
        del device
        return None


EAGER_GPT = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = F.softmax(q @ k.transpose(-2, -1), dim=-1)
        mixed = F.dropout(scores, 0.1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm1(x)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x.unsqueeze(1).expand(-1, 256, -1))
        for block in self.blocks:
            x = block(x)
        return x

WIDTH, HEADS = 256, 8

def build_model():
    return Model()
"""


def test_eager_attention_keeps_its_scores_as_korthikanti_counts(tmp_path: Path) -> None:
    # s·b·h·(34 + 5·a·s/h) = 256·2·256·(34 + 5·8·256/256) = 74 · 131,072 bytes
    graph = traced(tmp_path, EAGER_GPT)
    axes = infer_axes(graph)
    prices = OpPricer(graph, axes, batch=2, precision=Precision.BF16, device=device())
    saved = alone(prices, layer_of(prices, "Block"))[Recompute.NONE].saved_bytes
    assert saved == pytest.approx(74 * 256 * 2 * 256, rel=0.03)
