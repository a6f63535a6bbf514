"""Tests of what crosses a cut between layers."""

from autopar.planner.layers import residence
from tests.planner.costs.ops.op_factories import known


def test_a_chain_hands_on_one_tensor_per_cut() -> None:
    graph, _, layers = known("gpt2.py")
    cuts = residence(graph, layers).cuts
    assert [len(cut) for cut in cuts] == [1] * (len(layers.layers) - 1) + [0]


def test_what_crosses_was_made_before_the_cut_and_is_used_behind_it() -> None:
    for name in ("t5.py", "resnet.py", "llama.py", "bert.py"):
        graph, _, layers = known(name)
        found = residence(graph, layers)
        for position, cut in enumerate(found.cuts):
            for tensor in cut:
                assert found.maker[tensor] <= position < max(found.users[tensor])
                assert graph.tensors[tensor].requires_grad


def test_a_skip_over_several_layers_crosses_all_their_cuts() -> None:
    graph, _, layers = known("t5.py")
    cuts = residence(graph, layers).cuts
    spans = [sum(tensor in cut for cut in cuts) for tensor in {t for cut in cuts for t in cut}]
    assert max(spans) > 1
