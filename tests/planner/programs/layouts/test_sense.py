"""With real costs the program rediscovers what people know, and it does so quickly."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.cluster.sheet import find_device
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, OpLayout, ParameterLayout, conversion, split
from autopar.planner.layers import Layers, find_layers
from autopar.planner.precision import Precision
from autopar.planner.programs.layouts.choice import Budget, LayoutSolution
from autopar.planner.programs.layouts.rules import LayoutPin, LayoutRules
from tests.planner.programs.layouts.layout_checks import check, parameter_parts, solve_layouts
from tests.planner.subjects import zoo_graph

DEGREE = 8
GPT2 = ("gpt2.py", "size=124m", "layers=2", "heads=32", "dim=2048")
LLAMA = ("llama.py", "size=8b", "layers=2", "seq_len=4096")


@cache
def _subject(*model: str) -> tuple[Graph, GraphAxes, Layers]:
    graph = zoo_graph(*model)
    axes = infer_axes(graph)
    return graph, axes, find_layers(graph, axes)


def _front(
    model: tuple[str, ...], *, forbidden: set[str], batch: int = 4, device: str = "a100",
    pins: tuple[LayoutPin, ...] = (),
) -> tuple[LayoutSolution, ...]:  # fmt: skip
    graph, axes, layers = _subject(*model)
    pricer = OpPricer(
        graph, axes, batch=batch, precision=Precision.BF16, device=find_device(device),
        layers=layers,
    )  # fmt: skip
    shape = group_shape(choose_cluster(DEGREE, device), DEGREE, 1)
    front = solve_layouts(
        graph, axes, layers, pricer, degree=DEGREE, shape=shape,
        rules=LayoutRules(forbidden=tuple(forbidden), pins=pins),
        budget=Budget(weight_factor=8),
    )  # fmt: skip
    for solution in front:
        check(
            graph, axes, layers, layouts=solution.layouts, parameters=solution.parameters,
            crossing=solution.crossing, degree=DEGREE, batch=batch,
        )  # fmt: skip
    return front


def _block(solution: LayoutSolution, model: tuple[str, ...]) -> dict[str, OpLayout]:
    """Return the layouts of the ops of the model's block."""
    _, _, layers = _subject(*model)
    number = next(i for i, c in enumerate(layers.classes) if c.name == "Block")
    ops = layers.layers[layers.classes[number].layers[0]].ops
    return {op.name: own for op, own in zip(ops, solution.layouts[number], strict=True)}


def _collectives(solution: LayoutSolution, model: tuple[str, ...]) -> Counter[tuple[str, str]]:
    """Count the collectives of the second block's activations, forward and backward."""
    graph, _, layers = _subject(*model)
    own = _block(solution, model)
    number = next(i for i, c in enumerate(layers.classes) if c.name == "Block")
    layer = layers.layers[layers.classes[number].layers[0]]
    crossing = {c.name: c.layout for c in solution.crossing}
    produced = {
        name: layout
        for op in layer.ops
        for name, layout in zip(op.outputs, own[op.name].gives, strict=True)
    }
    edges = {
        (name, produced.get(name) or crossing[name], need)
        for op in layer.ops
        for name, need in zip(op.inputs, own[op.name].needs, strict=True)
        if (name in produced or name in crossing) and graph.tensors[name].requires_grad
    }
    edges |= {(n, produced[n], crossing[n]) for n in produced.keys() & crossing.keys()}
    found: Counter[tuple[str, str]] = Counter()
    for _, before, after in edges:
        turned = conversion(before, after)
        if turned is not None:
            for way, step in (("forward", turned.forward), ("backward", turned.backward)):
                if isinstance(step, Collective):
                    found[way, step.value] += 1
    return found


@pytest.mark.parametrize("device", ["a100", "h100"])
@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_without_sequence_splits_it_is_classic_tensor_parallelism(
    model: tuple[str, ...], device: str
) -> None:
    fastest = _front(model, forbidden={"batch", "seq", "embed"}, device=device)[0]
    counted = _collectives(fastest, model)
    all_reduce = Collective.ALL_REDUCE.value
    assert counted == {("forward", all_reduce): 2, ("backward", all_reduce): 2}


@pytest.mark.parametrize(("model", "batch"), [(GPT2, 4), (LLAMA, 1)])
def test_with_sequence_splits_some_point_is_tensor_and_sequence_parallelism(
    model: tuple[str, ...], batch: int
) -> None:
    gather, scatter = Collective.ALL_GATHER.value, Collective.REDUCE_SCATTER.value
    expected = {
        ("forward", gather): 2, ("forward", scatter): 2,
        ("backward", gather): 2, ("backward", scatter): 2,
    }  # fmt: skip
    front = _front(model, forbidden={"batch"}, batch=batch)
    assert any(_collectives(solution, model) == expected for solution in front)


def test_a_fused_projection_is_cut_in_each_of_its_parts() -> None:
    _, axes, _ = _subject(*GPT2)
    fastest = _front(GPT2, forbidden={"batch", "seq"})[0]
    lies = {p.name: p.layout for p in fastest.parameters}
    fused = lies["h.1.attn.c_attn.weight"]
    dim, parts = parameter_parts(axes, "h.1.attn.c_attn.weight", fused)
    assert (dim, parts) == (0, ((32, 64), (32, 64), (32, 64)))


def test_a_large_vocabulary_is_split_from_the_logits_to_the_loss() -> None:
    graph, axes, layers = _subject(*LLAMA)
    fastest = _front(LLAMA, forbidden={"batch", "seq"})[0]
    loss = next(op for op in graph.ops if op.target == "aten.cross_entropy_loss.default")
    layer = next(layer for layer in layers.layers if loss in layer.ops)
    chosen = fastest.layouts[layer.layer_class][layer.ops.index(loss)]
    assert axes.names[chosen.axis] == "vocab"
    assert chosen.gives == (WHOLE,)


def test_a_pin_splits_the_module_along_its_axis() -> None:
    graph, axes, layers = _subject(*GPT2)
    pinned = _front(GPT2, forbidden={"batch"}, pins=(LayoutPin(modules="h.*.mlp", axis="seq"),))[0]
    block = _block(pinned, GPT2)
    ops = [op for layer in layers.layers for op in layer.ops if op.name in block]
    inside = [op for op in ops if ".mlp" in graph.calls[op.call].path]
    assert inside
    assert {axes.names.get(block[op.name].axis) for op in inside} == {"seq"}


def test_unknown_axes_and_modules_are_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="head") as caught:
        _front(GPT2, forbidden={"head"})
    assert "heads" in caught.value.expected
    with pytest.raises(InputError, match=r"h\.\*\.mpl"):
        _front(GPT2, forbidden=set(), pins=(LayoutPin(modules="h.*.mpl", axis="ffn"),))


def test_a_wrong_plan_is_refused_with_its_edge() -> None:
    graph, axes, layers = _subject(*GPT2)
    fastest = _front(GPT2, forbidden={"batch", "seq"})[0]
    parameters = tuple(
        ParameterLayout(name=p.name, layout=split(p.layout.axis, 1))
        if p.name == "h.0.attn.c_attn.weight"
        else p
        for p in fastest.parameters
    )
    with pytest.raises(InputError, match=r"kinds of layers"):
        check(
            graph, axes, layers, layouts=fastest.layouts[:-1], parameters=fastest.parameters,
            crossing=fastest.crossing, degree=DEGREE, batch=4,
        )  # fmt: skip
    with pytest.raises(InputError, match=r"c_attn\.weight is"):
        check(
            graph, axes, layers, layouts=fastest.layouts, parameters=parameters,
            crossing=fastest.crossing, degree=DEGREE, batch=4,
        )  # fmt: skip


def test_the_program_does_not_grow_with_depth() -> None:
    sizes = [
        _front(("gpt2.py", "size=124m", f"layers={depth}"), forbidden={"batch"})[0].report
        for depth in (4, 12)
    ]
    assert sizes[0].variables == sizes[1].variables
    assert sizes[0].constraints == sizes[1].constraints
