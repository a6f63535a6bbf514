"""Recomputed layers give the same results and keep less."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.recompute.running_again import Mode, recompute, recomputes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.dropout(torch.sin(self.up(x)), 0.5)
        return torch.as_tensor(self.down(inner))


class Matmuls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.name() in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


class Telling(Layer):
    """Raises an error of its own over any other, as einx does around its operations."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception as error:
            raise ValueError(f"wrong input of shape {tuple(x.shape)}") from error


def gradients(
    mode: Mode, keep: tuple[str, ...] | None = None, kind: type[Layer] = Layer
) -> tuple[list[Tensor], int, int]:
    """Return the gradients, the matrix products of the backward, and the bytes kept for it."""
    torch.manual_seed(0)
    layer = kind()
    recompute(layer, mode, keep=keep)
    x = torch.randn(4, 8, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = layer(x).square().sum()
    with Matmuls() as matmuls:  # type: ignore[no-untyped-call]
        loss.backward()
    found = [parameter.grad for parameter in (x, *layer.parameters())]
    return [g for g in found if g is not None], matmuls.count, sum(kept.values())


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_the_same_with_the_same_dropout(mode: Mode) -> None:
    expected, _, _ = gradients("none")
    found, _, _ = gradients(mode)
    assert len(found) == 5
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_full_computes_products_again_and_selective_does_not() -> None:
    _, plain, _ = gradients("none")
    assert gradients("selective")[1] == plain
    assert gradients("full")[1] == plain + 1  # early stop: the last product is not needed
    assert gradients("selective", keep=())[1] == plain + 1


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_forward_that_turns_every_exception_into_its_own_may_run_again(mode: Mode) -> None:
    expected, _, _ = gradients("none")
    found, _, _ = gradients(mode, kind=Telling)
    assert len(found) == 5
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [Layer, Telling])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_a_forward_made_again_is_gone_after_the_backward(
    mode: Mode, kind: type[Layer]
) -> None:
    """Without the collector of cycles, which comes too late for a peak of memory."""
    layer = kind()
    made: list[weakref.ref[Tensor]] = []
    layer.down.register_forward_pre_hook(lambda _, given: made.append(weakref.ref(given[0])))
    recompute(layer, mode)
    gc.disable()
    try:
        layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert len(made) == 2
        assert [inner() for inner in made] == [None, None]
    finally:
        gc.enable()


def test_an_error_of_a_forward_that_runs_again_is_its_own() -> None:
    layer = Layer()
    recompute(layer, "full")
    loss = layer(torch.randn(4, 8, requires_grad=True)).sum()
    layer.up.bias = None  # type: ignore[assignment]
    layer.up.weight = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        loss.backward()


def test_full_recomputation_saves_less_memory_for_the_backward() -> None:
    assert gradients("full")[2] < gradients("none")[2]


def test_a_model_knows_whether_a_layer_inside_recomputes() -> None:
    inner = Layer()
    model = nn.Sequential(inner)
    assert not recomputes(model)
    recompute(inner, "none")
    assert not recomputes(model)
    recompute(inner, "full")
    assert recomputes(model)
    assert next(name for name, _ in model.named_parameters()) == "0.up.weight"


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_running_statistics_count_a_batch_once(mode: Mode) -> None:
    plain, again = (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2))
    again.load_state_dict(plain.state_dict())
    recompute(again, mode)
    x = torch.randn(8, 4)
    for model in (plain, again):
        model(x).square().sum().backward()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


class Counting(Layer):
    """Computes with a number that each run raises, and with one that each run replaces."""

    count: Tensor
    last: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.ones(8))
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.last * 0.5
        count = self.count + 0  # which no later run writes
        out: Tensor = super().forward(x * self.last * self.table).sin() * count
        return out


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_buffers_that_a_layer_writes_are_as_they_were_where_it_runs_again(mode: Mode) -> None:
    plain, again = Counting(), Counting()
    again.load_state_dict(plain.state_dict())
    recompute(again, mode)
    x = torch.randn(3, 8)
    for model in (plain, again):
        torch.manual_seed(0)  # of the dropout
        for _ in range(2):
            first, second = model(x), model(x + 1)  # before either backward, as pipelines do
            (first.sum() + second.square().sum()).backward()
    assert float(again.count) == float(plain.count) == 4
    assert torch.equal(again.last, plain.last)
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_a_class_that_an_instance_takes_later_is_the_one_that_runs() -> None:
    class Doubled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    layer = Layer()
    recompute(layer, "full")
    layer.__class__ = Doubled
    assert torch.equal(layer(torch.ones(8)), torch.full((8,), 2.0))
