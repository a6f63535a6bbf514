"""Stages run one after the other compute what the whole model does."""

from __future__ import annotations

import copy
import re
from itertools import combinations, pairwise, product

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.planner.errors import InputError
from autopar.planner.layers import residence
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.forward.running import (
    Result,
    assert_same,
    float64_batch,
    float64_model,
    loss_of,
    namespace,
    original,
    result,
    stage_modules,
    staged_loss,
    use_classes,
    zoo_modules,
)
from tests.codegen.forward.small_models import Adding, AddingToViews, Denoising, Masking, file_of
from tests.planner.subjects import ZOO_MODELS, zoo_file, zoo_graph


def without(model: nn.Module, kept: set[str]) -> nn.Module:
    """Return a copy of a model without the modules that a stage does not name."""
    part = copy.deepcopy(model)
    for path in [path for path, _ in model.named_modules() if path]:
        is_kept = any(k == path or k.startswith(f"{path}.") for k in kept)
        owner, _, leaf = path.rpartition(".")
        if not is_kept and all(p in dict(part.named_modules()) for p in (owner, path)):
            part.get_submodule(owner)._modules[leaf] = None
    return part


def run_stages(name: str, opened: OpenedSource, *arguments: str, drop: bool = False) -> Result:
    """Run the stages one after the other on one model, or each on a copy with its modules alone."""
    before, _ = original(name, *arguments)
    file, found = zoo_file(name, *arguments), namespace(opened)
    batch = float64_batch(file)
    whole = copy.deepcopy(before)
    use_classes(whole, opened.classes, found)
    parts = stage_modules(whole, opened, found)
    if drop:
        names = [set(stage.modules) for stage in opened.stages]
        parts = [without(part, kept) for part, kept in zip(parts, names, strict=True)]
    return result(whole, lambda: staged_loss(file, parts, opened, batch))


def cuts(layers: int, stages: int) -> list[list[int]]:
    """Return every way to give each stage at least one layer."""
    found = []
    for borders in combinations(range(1, layers), stages - 1):
        ends = (0, *borders, layers)
        found.append([b - a for a, b in pairwise(ends)])
    return found


CUT = list(product(ZOO_MODELS, (2, 3)))


@pytest.mark.parametrize(("name", "stages"), cells(CUT, CUT[1::2]))
def test_stages_compute_what_the_model_does_wherever_they_are_cut(name: str, stages: int) -> None:
    split = split_graph(zoo_graph(name), zoo_modules(name))
    _, expected = original(name)
    every = cuts(len(split.layers.layers), stages)
    for counts in every[:: max(1, len(every) // 5)]:
        assert_same(run_stages(name, open_split(split, counts)), expected)


@pytest.mark.parametrize("name", ["gpt2.py", "t5.py", "resnet.py"])
def test_a_stage_needs_only_the_modules_that_it_names(name: str) -> None:
    split = split_graph(zoo_graph(name), zoo_modules(name))
    count = len(split.layers.layers)
    opened = open_split(split, [count // 2, count - count // 2])
    assert_same_loss(run_stages(name, opened, drop=True), original(name)[1])


class Wide(nn.Module):
    """Scales in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.weight.float()


class Pinned(nn.Module):
    """Gives the next stage float32, which goes on in the model's own type."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(8, 4), Wide(), Wide()
        self.out = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.out(self.second(self.first(x)).to(x.dtype))
        return out.square().mean()


def test_a_stage_reads_the_type_of_the_model_from_a_parameter_that_it_has() -> None:
    split = split_graph(trace(file_of(Pinned)), modules_of(Pinned()))
    asked = set[str]()
    for counts in cuts(len(split.layers.layers), 2):
        last = open_split(split, counts).stages[-1]
        found = re.findall(r"self\.(\w+)\.weight\.dtype", last.cls.source)
        assert set(found) <= set(last.modules)
        asked.update(found)
    assert asked


def test_stages_of_one_form_share_a_class_and_differ_in_bounds() -> None:
    arguments = ("layers=8",)
    graph = zoo_graph("llama.py", *arguments)
    split = split_graph(graph, zoo_modules("llama.py", *arguments))
    opened = open_split(split, [3, 2, 2, 1, 3])
    assert [stage.cls.name for stage in opened.stages] == [
        "FirstStage", "MiddleStage", "MiddleStage", "MiddleStage", "LastStage",
    ]  # fmt: skip
    assert len({stage.cls.source for stage in opened.stages}) == 3
    middle = [dict(stage.bounds) for stage in opened.stages[1:4]]
    assert middle == [{"first": 2, "end": 4}, {"first": 4, "end": 6}, {"first": 6, "end": 7}]
    found = run_stages("llama.py", opened, *arguments)
    assert_same(found, original("llama.py", *arguments)[1])


def test_several_tensors_cross_from_the_encoder_to_the_decoder() -> None:
    split = split_graph(zoo_graph("t5.py"), zoo_modules("t5.py"))
    names = [layer.call for layer in split.layers.layers]
    cut = names.index("decoder.0.cross_norm")
    opened = open_split(split, [cut, len(names) - cut])
    assert len(opened.stages[0].gives) == 3  # the stream, what was encoded, the bias of the heads


def test_what_several_stages_need_of_random_numbers_is_drawn_once_and_given_on() -> None:
    file = file_of(Denoising)
    model, batch = float64_model(file), float64_batch(file)
    split = split_graph(trace(file), modules_of(Denoising()))
    expected = result(copy.deepcopy(model), lambda: loss_of(file, model, batch))
    count = len(split.layers.layers)
    opened = open_split(split, [count - 2, 1, 1])
    assert [stage.cls.source.count("torch.rand") for stage in opened.stages] == [2, 0, 0]
    noise, *others = opened.stages[1].gives
    assert not noise.has_gradient
    assert all(other.has_gradient for other in others)
    parts = stage_modules(model, opened, namespace(opened))
    found = result(model, lambda: staged_loss(file, parts, opened, batch))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["t5.py", "resnet.py", "random numbers"])
def test_the_planner_prices_what_crosses_each_cut(name: str) -> None:
    is_zoo = name in ZOO_MODELS
    graph = zoo_graph(name) if is_zoo else trace(file_of(Denoising))
    split = split_graph(graph, zoo_modules(name) if is_zoo else modules_of(Denoising()))
    priced, count = residence(graph, split.layers).cuts, len(split.layers.layers)
    for position in range(count - 1):
        first, _ = open_split(split, [position + 1, count - position - 1]).stages
        given = {one.name for one in first.gives}
        assert given <= set(priced[position])
        # A draw that only later stages need is theirs, though its layer stands before the cut.
        assert set(priced[position]) - given <= {"randint"}


def test_memory_that_is_filled_at_random_for_several_stages_is_refused() -> None:
    split = split_graph(trace(file_of(Masking)), modules_of(Masking()))
    count = len(split.layers.layers)
    with pytest.raises(InputError, match="fills a tensor with random numbers that several stages"):
        open_split(split, [count - 1, 1])


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_stage_writes_into_its_own_copy_of_what_it_receives(behind: int) -> None:
    file, whole = file_of(Adding), Adding()
    split = split_graph(trace(file), modules_of(Adding()))
    count = len(split.layers.layers)
    opened = open_split(split, [behind, count - behind])
    batch = file.example_batch(2)
    expected = whole(**batch)
    expected.backward()
    first, last = stage_modules(copy.deepcopy(whole), opened, namespace(opened))
    first.zero_grad()
    given = first(**batch)
    sent = given if isinstance(given, tuple) else (given,)
    received = [one.detach().requires_grad_() for one in sent]
    loss = last(*received, **batch)
    loss.backward()
    learnt = [pair for pair in zip(sent, received, strict=True) if pair[0].requires_grad]
    torch.autograd.backward([one for one, _ in learnt], [one.grad for _, one in learnt])
    torch.testing.assert_close(loss, expected)
    gradients = [parameter.grad for parameter in first.parameters()]
    torch.testing.assert_close(gradients, [parameter.grad for parameter in whole.parameters()])


def test_a_write_into_what_crosses_a_cut_as_a_view_too_is_refused() -> None:
    split = split_graph(trace(file_of(AddingToViews)), modules_of(AddingToViews()))
    count = len(split.layers.layers)
    with pytest.raises(InputError, match="of which a stage receives views, too"):
        open_split(split, [count - 1, 1])


def assert_same_loss(found: Result, expected: Result) -> None:
    """Compare losses: parts that are copies have their own gradients."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
