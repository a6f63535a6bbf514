"""What an optimizer demands of a rank is found by trying it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from autopar.planner.annotate import state_of
from autopar.planner.costs.prediction import Zero
from autopar.planner.errors import InputError
from autopar.planner.findings import Reach, with_moments
from autopar.planner.findings.optimizer import optimizer_traits
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.declared.limits import with_optimizer
from autopar.planner.precision import Precision
from tests.planner.plan.searches import declared
from tests.planner.subjects import ZOO, zoo_file, zoo_graph


def gpt2() -> Graph:
    return zoo_graph("gpt2.py")


class Adapted(optim.SGD):
    """Clips each gradient by the norm of its parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.mul_((one.detach().norm() / one.grad.norm()).clamp(max=1))
        return super().step(closure)


class Clipped(optim.SGD):
    """Clips all gradients by their norm together."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1)
        return super().step(closure)


class Noisy(optim.SGD):
    """Adds noise of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.add_(torch.randn_like(one))
        return super().step(closure)


class NoisyByNumpy(optim.SGD):
    """Adds noise of numpy's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.add_(torch.from_numpy(np.random.randn(*one.shape)))
        return super().step(closure)


class NoisyByItself(optim.SGD):
    """Adds noise of a generator of its own, of torch or of numpy."""

    def __init__(self, parameters: Any, *, by_numpy: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.of_numpy = np.random.default_rng(0) if by_numpy else None
        self.of_torch = torch.Generator().manual_seed(0)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if self.of_numpy is None:
                    one.grad.add_(torch.randn(one.shape, generator=self.of_torch))
                else:
                    one.grad.mul_(self.of_numpy.random())
        return super().step(closure)


class Centred(optim.SGD):
    """Takes from each gradient the mean along one of its dims."""

    def __init__(self, parameters: Any, dim: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.dim = dim

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.dim() > 1:
                    one.grad.sub_(one.grad.mean(self.dim, keepdim=True))
        return super().step(closure)


def file_with(make: Callable[[list[nn.Parameter]], Any]) -> ModelFile:
    def build(parameters: Iterable[nn.Parameter]) -> Any:
        return make(list(parameters))

    return replace(zoo_file("gpt2.py"), build_optimizer=build, build_scheduler=None)


def by_dim(parameters: list[nn.Parameter]) -> optim.Optimizer:
    matrices = [one for one in parameters if one.dim() > 1]
    vectors = [one for one in parameters if one.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return optim.AdamW(groups)


def matrices(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.Muon([one for one in parameters if one.dim() == 2])


def by_place(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW([{"params": [one], "lr": 1e-3 * n} for n, one in enumerate(parameters)])


def test_one_that_takes_sparse_gradients_alone_is_refused() -> None:
    file = replace(zoo_file("gpt2.py"), build_optimizer=optim.SparseAdam, build_scheduler=None)
    with pytest.raises(InputError, match="SparseAdam takes sparse gradients alone"):
        optimizer_traits(file, gpt2())


@pytest.mark.parametrize(
    ("make", "reach", "groups_by_position"),
    [
        (optim.AdamW, Reach.NUMBER, False),
        (optim.Adagrad, Reach.NUMBER, False),
        (optim.Rprop, Reach.NUMBER, False),
        (lambda own: Noisy(own, lr=0.1), Reach.NUMBER, False),
        (by_dim, Reach.NUMBER, False),
        (by_place, Reach.NUMBER, True),
        (matrices, Reach.PARAMETER, False),
        (optim.Adafactor, Reach.PARAMETER, False),
        (lambda own: Adapted(own, lr=0.1), Reach.PARAMETER, False),
        (lambda own: Centred(own, dim=0), Reach.PARAMETER, False),
        (lambda own: Centred(own, dim=1), Reach.PARAMETER, False),
        (lambda own: Clipped(own, lr=0.1), Reach.MODEL, False),
        (lambda own: Renormed(own, lr=0.1), Reach.PARAMETER, False),
        (lambda own: Growing(own, lr=0.01), Reach.MODEL, False),
    ],
)
def test_an_optimizer_is_known_by_what_changes_its_updates(
    make: Callable[[list[nn.Parameter]], Any], reach: Reach, groups_by_position: bool
) -> None:
    file = replace(zoo_file("gpt2.py"), build_optimizer=make, build_scheduler=None)
    traits = optimizer_traits(file, gpt2())
    assert traits is not None
    assert (traits.reach, traits.groups_by_position) == (reach, groups_by_position)


@pytest.mark.parametrize(
    ("make", "draws"),
    [
        (optim.AdamW, False),
        (lambda own: Noisy(own, lr=0.1), True),
        (lambda own: NoisyByNumpy(own, lr=0.1), True),
        (lambda own: NoisyByItself(own, by_numpy=False), True),
        (lambda own: NoisyByItself(own, by_numpy=True), True),
    ],
)
def test_an_optimizer_that_draws_is_known_whatever_it_draws_from(
    make: Callable[[list[nn.Parameter]], Any], draws: bool
) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    traits = optimizer_traits(file_with(make), gpt2())
    assert traits is not None
    assert traits.draws is draws
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == repr(states[2])
    found = with_optimizer(declared(global_batch=8), traits)
    assert (found.max_tensor, found.steps_once) == ((1, True) if draws else (None, False))


class Wrapping(optim.Optimizer):
    """Steps another optimizer, without the __init__ of its base."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Decayed(optim.SGD):
    """Decays matrices in its step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    one.mul_(0.9 if one.ndim > 1 else 1)
        return super().step(closure)


class Renormed(optim.SGD):
    """Gives matrices rows of length one, in every tenth step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        for group in self.param_groups if self.steps % 10 == 0 else ():
            for one in group["params"]:
                if one.ndim == 2:
                    one.data.div_(one.data.norm(dim=1, keepdim=True))


class Growing(optim.SGD):
    """Takes larger steps the further all parameters have gone along their gradients (Prodigy)."""

    start: list[torch.Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        stepped = [one for group in self.param_groups for one in group["params"]]
        self.start = self.start or [one.detach().clone() for one in stepped]
        gone = sum(
            float((one.grad * (was - one.detach())).sum())
            for one, was in zip(stepped, self.start, strict=True)
        )
        length = sum(float(one.grad.abs().sum()) for one in stepped)
        for group in self.param_groups:
            group["lr"] = max(group["lr"], gone / length)
        return super().step(closure)


class Sized(optim.SGD):
    """Takes larger steps in larger parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.mul_(one.numel() ** 0.5)
        return super().step(closure)


def by_width(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW([{"params": [one], "lr": 1 / one.shape[-1]} for one in parameters])


def by_threshold(parameters: list[nn.Parameter]) -> optim.Optimizer:
    large = [one for one in parameters if one.numel() > 100]
    small = [one for one in parameters if one.numel() <= 100]
    groups: list[dict[str, Any]] = [{"params": large, "lr": 1e-4}, {"params": small}]
    return optim.AdamW([group for group in groups if group["params"]])


class Slow(optim.SGD):
    """Keeps copies of the parameters beside its state."""

    def __init__(self, own: list[nn.Parameter], *, is_flat: bool) -> None:
        super().__init__(own, lr=0.1)
        self.same, self.factors = own, torch.ones(5)  # no copies: what it steps, and constants
        copies = [one.detach().clone() for one in own]
        self.slow = torch.cat([one.flatten() for one in copies]) if is_flat else {"of": copies}


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (optim.AdamW, ()),
        (lambda own: Slow(own, is_flat=False), ("slow",)),
        (lambda own: Slow(own, is_flat=True), ("slow",)),
        (lambda own: Around(Slow(own, is_flat=False)), ("inner.slow",)),
    ],
)
def test_copies_of_parameters_beside_the_state_are_found_and_not_sharded(
    make: Callable[[list[nn.Parameter]], Any], found: tuple[str, ...]
) -> None:
    traits = optimizer_traits(file_with(make), gpt2())
    assert traits is not None
    assert traits.own_tensors == found
    levels = with_optimizer(declared(global_batch=8), traits).zero_levels
    assert (levels == (Zero.NONE,)) is bool(found)


class Around(optim.Optimizer):
    """Steps another optimizer."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Plain:
    """Steps parameters, and is no optimizer of torch's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]

    def step(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("make", "lacks"),
    [
        (lambda own: Wrapping(optim.SGD(own)), "whose __init__ never called super().__init__"),
        (Plain, "not a torch Optimizer"),
    ],
)
def test_what_is_no_optimizer_of_torch_is_refused_with_what_to_write(
    make: Callable[[list[nn.Parameter]], Any], lacks: str
) -> None:
    with pytest.raises(InputError) as told:
        optimizer_traits(file_with(make), gpt2())
    assert lacks in told.value.found
    assert "super().__init__(inner.param_groups, {})" in told.value.fix


def test_the_optimizers_of_the_zoo_leave_every_plan() -> None:
    constraints = declared(global_batch=8)
    traits = optimizer_traits(zoo_file("gpt2.py"), gpt2())
    assert with_optimizer(constraints, traits) is constraints
    assert with_moments(gpt2(), traits) == gpt2()


@pytest.mark.parametrize(
    ("make", "limits"),
    [
        (optim.Adafactor, (1, None, (0,))),
        (by_place, (None, 1, (0, 1, 2, 3))),
        (lambda own: Clipped(own, lr=0.1), (1, 1, (0,))),
        (by_dim, (None, None, (0, 1, 2, 3))),
        (by_width, (1, None, (0, 1, 2, 3))),
        (by_threshold, (1, None, (0, 1, 2, 3))),
        (lambda own: Decayed(own, lr=0.1), (None, None, (0, 2, 3))),
        (lambda own: Sized(own, lr=0.1), (1, None, (0,))),
    ],
)
def test_a_plan_holds_what_the_optimizer_needs(
    make: Callable[[list[nn.Parameter]], Any], limits: tuple[int | None, int | None, Any]
) -> None:
    traits = optimizer_traits(file_with(make), gpt2())
    found = with_optimizer(declared(global_batch=8), traits)
    assert (found.max_tensor, found.max_pipeline, found.zero_levels) == limits


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda own: optim.SGD(own, lr=0.1), 0.0),
        (lambda own: optim.SGD(own, lr=0.1, momentum=0.9), 1.0),
        (lambda own: optim.Adam(own, amsgrad=True), 3.0),
    ],
)
def test_a_plan_has_room_for_what_the_optimizer_keeps(
    make: Callable[[list[nn.Parameter]], Any], moments: float
) -> None:
    graph = with_moments(gpt2(), optimizer_traits(file_with(make), gpt2()))
    assert {one.moments for one in graph.parameters} == {moments}
    plain, found = (state_of(one.parameters, Precision.BF16) for one in (gpt2(), graph))
    assert found.optimizer_bytes == plain.optimizer_bytes * (1 + moments) / 3
    assert found.gradient_bytes == plain.gradient_bytes


def test_one_that_wants_the_loss_again_is_refused() -> None:
    with pytest.raises(InputError, match=r"LBFGS\.step cannot be called without arguments"):
        optimizer_traits(file_with(optim.LBFGS), gpt2())


@pytest.mark.parametrize(
    "file", [file_with(optim.AdamW), replace(zoo_file("gpt2.py"), build_optimizer=None)]
)
def test_a_scheduler_that_wants_a_measure_is_refused(file: ModelFile) -> None:
    file = replace(file, build_scheduler=lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(InputError, match=r"ReduceLROnPlateau\.step cannot be called"):
        optimizer_traits(file, gpt2())


def test_one_that_returns_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"build_optimizer returns a NoneType, which has no step"):
        optimizer_traits(file_with(lambda _: None), gpt2())
    file = replace(file_with(optim.AdamW), build_scheduler=lambda _: None)
    with pytest.raises(InputError, match=r"build_scheduler returns a NoneType"):
        optimizer_traits(file, gpt2())


def test_one_that_fails_with_any_parameters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    source = (ZOO / "intent.py").read_text(encoding="utf-8")
    path.write_text(
        f"{source}\n\ndef build_optimizer(params):\n"
        "    return torch.optim.AdamW(params.parameters())\n"
    )
    with pytest.raises(InputError, match="'list' object has no attribute 'parameters'"):
        optimizer_traits(load_model_file(str(path)), gpt2())


def test_one_that_reads_what_a_model_hangs_on_its_parameters_is_left_to_the_script(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.py"
    source = (ZOO / "intent.py").read_text(encoding="utf-8")
    path.write_text(
        f"{source}\n\ndef build_optimizer(params):\n"
        "    return torch.optim.AdamW([p for p in params if p.decays])\n"
    )
    assert optimizer_traits(load_model_file(str(path)), gpt2()) is None


def test_one_that_cannot_be_tried_here_is_left_to_the_script() -> None:
    class Elsewhere(optim.SGD):
        def step(self, *_: Any) -> Any:
            raise RuntimeError("wants a GPU")

    assert optimizer_traits(file_with(lambda own: Elsewhere(own, lr=0.1)), gpt2()) is None


def without_decay_of_norms(named_parameters: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    norms = [one for name, one in named_parameters if "ln" in name]
    others = [one for name, one in named_parameters if "ln" not in name]
    groups: list[dict[str, Any]] = [{"params": norms, "weight_decay": 0.0}, {"params": others}]
    return optim.AdamW([group for group in groups if group["params"]])


def by_modules(model: nn.Module) -> optim.Optimizer:
    norms = [
        m.weight for m in model.modules() if isinstance(m, nn.LayerNorm) and m.weight is not None
    ]
    known = set(map(id, norms))
    others = [one for one in model.parameters() if id(one) not in known]
    groups: list[dict[str, Any]] = [{"params": norms, "weight_decay": 0.0}, {"params": others}]
    return optim.AdamW([group for group in groups if group["params"]])


@pytest.mark.parametrize("make", [without_decay_of_norms, by_modules])
def test_groups_by_names_or_modules_are_no_groups_by_place(make: Callable[..., Any]) -> None:
    file = replace(zoo_file("gpt2.py"), build_optimizer=make, build_scheduler=None)
    traits = optimizer_traits(file, gpt2())
    assert traits is not None
    assert (traits.reach, traits.groups_by_position) == (Reach.NUMBER, False)
    assert set(traits.moments) == {2.0}


def in_halves(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)


def a_rate_for_each_half(optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
    return optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda _: 1.0])


def test_groups_that_a_scheduler_alone_tells_apart_are_groups() -> None:
    for schedule, by_places in ((None, False), (a_rate_for_each_half, True)):
        file = replace(zoo_file("gpt2.py"), build_optimizer=in_halves, build_scheduler=schedule)
        traits = optimizer_traits(file, gpt2())
        assert traits is not None
        assert traits.groups_by_position is by_places
