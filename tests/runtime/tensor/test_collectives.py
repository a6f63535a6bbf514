"""Every conversion against the numerical gradient of a scalar made of all ranks' outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar.runtime.ranks.mesh import DRY_RUN, Axis, start, stop
from autopar.runtime.tensor import collectives
from autopar.runtime.tensor.slices import Cut, Parts, cut, slice_along
from tests.cells import cells
from tests.runtime.processes import run_on_ranks

WHOLE = {
    "sum_gradients": "IR",
    "sum_partials": "PI",
    "sum_both": "PR",
    "first_only": "IP",
    "first_whole": "RP",
    "first_gradient": "RI",
}
ALONG = {
    "scatter_sum": "PS",
    "gather": "SR",
    "gather_whole": "SI",
    "take_shard": "IS",
    "take_own": "RS",
    "place_own": "SP",
}
EVEN: Parts = ((6, 1),)
UNEVEN: Parts = ((5, 1),)
FUSED: Parts = ((2, 2), (3, 1), (1, 2))  # the last part has fewer blocks than there are ranks
Cuts = tuple[Cut, Cut]  # of the input, of the output; unused where the layout is not S


@dataclass(frozen=True)
class Case:
    """One conversion of a tensor whose true value is the same before and after it."""

    function: Callable[[Tensor], Tensor]
    layouts: str
    shape: tuple[int, ...]
    dims: tuple[int, int] = (0, 0)
    cuts: Cuts | None = None


def _true_value(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _local(case: Case, true: Tensor, axis: Axis) -> Tensor:
    """What one rank holds of the true value before the conversion."""
    if case.layouts[0] == "S":
        assert case.cuts is not None
        return slice_along(true, case.dims[0], case.cuts[0], axis)
    if case.layouts[0] == "P":
        others = [_true_value(case.shape, seed) for seed in range(1, axis.size)]
        rest = true - sum(others, start=torch.zeros_like(true))
        return [rest, *others][axis.rank]
    return true.clone()


def _true_output(case: Case, output: Tensor, axis: Axis) -> Tensor:
    """The part of the true output that this rank answers for."""
    if case.layouts[1] == "P":
        output = output.detach().clone()
        dist.all_reduce(output, group=axis.group)
    return output


def _weights(case: Case, axis: Axis) -> Tensor:
    weights = _true_value(case.shape, 99)
    if case.layouts[1] != "S":
        return weights
    assert case.cuts is not None
    return slice_along(weights, case.dims[1], case.cuts[1], axis)


def _objective(case: Case, true: Tensor, axis: Axis) -> float:
    """Return what this rank adds to the objective."""
    output = _true_output(case, case.function(_local(case, true, axis)), axis)
    counted = case.layouts[1] == "S" or axis.rank == 0
    return (_weights(case, axis) * output.sin()).sum().item() * counted


def _numerical_gradient(case: Case, axis: Axis) -> Tensor:
    step, gradient = 1e-6, torch.empty(case.shape, dtype=torch.float64)
    for index in range(gradient.numel()):
        up, down = _true_value(case.shape), _true_value(case.shape)
        up.view(-1)[index] += step
        down.view(-1)[index] -= step
        difference = _objective(case, up, axis) - _objective(case, down, axis)
        gradient.view(-1)[index] = difference / (2 * step)
    dist.all_reduce(gradient, group=axis.group)
    return gradient


def _check(case: Case, axis: Axis) -> None:
    true = _true_value(case.shape)
    x = _local(case, true, axis).requires_grad_()
    output = case.function(x)
    expected = true
    if case.layouts[1] == "S":
        assert case.cuts is not None
        expected = slice_along(true, case.dims[1], case.cuts[1], axis)
    whole_output = _true_output(case, output, axis)
    torch.testing.assert_close(whole_output, expected, rtol=0, atol=1e-12)

    gradient = _weights(case, axis) * whole_output.detach().cos()
    if case.layouts[1] == "R":  # the partial gradients of R differ from rank to rank
        shares = torch.arange(1.0, axis.size + 1, dtype=torch.float64)
        gradient = gradient * (shares / shares.sum())[axis.rank]
    output.backward(gradient)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    found = x.grad.clone()
    if case.layouts[0] == "R":
        dist.all_reduce(found, group=axis.group)
    numerical = _numerical_gradient(case, axis)
    if case.layouts[0] == "S":
        assert case.cuts is not None
        numerical = slice_along(numerical, case.dims[0], case.cuts[0], axis)
    torch.testing.assert_close(found, numerical, rtol=0, atol=1e-8)


def _tensor_axis() -> Axis:
    return start(pipeline=1, data=1, tensor=dist.get_world_size()).tensor


def _check_whole(name: str) -> None:
    function, axis = getattr(collectives, name), _tensor_axis()
    _check(Case(partial(function, axis=axis), WHOLE[name], (2, 3)), axis)


def _check_along(name: str) -> None:
    function, axis = getattr(collectives, name), _tensor_axis()
    for dim, parts in ((0, EVEN), (1, EVEN), (1, UNEVEN), (0, FUSED), (-1, FUSED)):
        held = cut(parts, axis.size)
        shape = (held.whole, 2) if dim == 0 else (2, held.whole)
        case = Case(
            partial(function, dim=dim, axis=axis, parts=parts),
            ALONG[name],
            shape,
            (dim % 2, dim % 2),
            (held, held),
        )
        _check(case, axis)


def _check_exchange() -> None:
    axis = _tensor_axis()
    for first, second in ((EVEN, EVEN), (UNEVEN, EVEN), (FUSED, UNEVEN)):
        cuts = (cut(first, axis.size), cut(second, axis.size))
        for dims in ((0, 1), (1, 0)):
            sizes = {dims[0]: cuts[0].whole, dims[1]: cuts[1].whole}
            function = partial(
                collectives.exchange,
                gather_dim=dims[0],
                split_dim=dims[1],
                axis=axis,
                gather_parts=first,
                split_parts=second,
            )
            _check(Case(function, "SS", (sizes[0], sizes[1]), dims, cuts), axis)


@pytest.mark.parametrize("size", cells((2, 3, 4), (3,)))
@pytest.mark.parametrize("name", WHOLE)
def test_a_conversion_of_the_whole_has_its_numerical_gradient(name: str, size: int) -> None:
    run_on_ranks(_check_whole, size, name)


@pytest.mark.parametrize("size", cells((2, 3), (3,)))
@pytest.mark.parametrize("name", ALONG)
def test_a_conversion_along_a_dim_has_its_numerical_gradient(name: str, size: int) -> None:
    run_on_ranks(_check_along, size, name)


@pytest.mark.parametrize("size", cells((2, 3), (3,)))
def test_the_exchange_has_its_numerical_gradient(size: int) -> None:
    run_on_ranks(_check_exchange, size)


def _check_defaults() -> None:
    axis = start(pipeline=1, data=1, tensor=dist.get_world_size()).tensor
    x = _true_value((5, 4))
    mine = collectives.take_shard(x, 0, axis)
    assert mine.shape[0] == (3, 2)[axis.rank]
    assert torch.equal(collectives.gather_whole(mine, 0, axis, ((5, 1),)), x)
    columns = collectives.take_shard(x, -1, axis)
    assert torch.equal(collectives.gather(columns, -1, axis), x)
    with pytest.raises(ValueError, match=r"rank .'s share is"):
        collectives.gather(columns, 0, axis, ((6, 1),))
    with pytest.raises(ValueError, match="dim 0 has 5 elements"):
        collectives.take_shard(x, 0, axis, ((6, 1),))


def test_parts_default_to_single_elements_and_wrong_ones_are_refused() -> None:
    run_on_ranks(_check_defaults, 2)


@pytest.mark.parametrize("name", [*WHOLE, *ALONG])
def test_an_axis_of_one_rank_changes_nothing(name: str) -> None:
    x, alone = torch.ones(3), Axis(0, 1, None)
    function = getattr(collectives, name)
    assert (function(x, alone) if name in WHOLE else function(x, 0, alone)) is x


def _check_large_sum() -> None:
    axis = start(pipeline=1, data=1, tensor=dist.get_world_size()).tensor
    x = torch.full((300_000,), float(axis.rank + 1))
    assert collectives.sum_partials(x, axis).eq(sum(range(1, axis.size + 1))).all()
    assert x.eq(axis.rank + 1).all()


@pytest.mark.parametrize("size", [2, 3])
def test_a_large_sum_leaves_its_input_alone(size: int) -> None:
    run_on_ranks(_check_large_sum, size)


def _sums_are_equal_bit_for_bit() -> bytes:
    axis = start(pipeline=1, data=1, tensor=dist.get_world_size()).tensor
    x = torch.randn(1000, generator=torch.Generator().manual_seed(axis.rank))
    return collectives.sum_partials(x, axis).numpy().tobytes()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_same_bits_of_a_sum(size: int) -> None:
    assert len(set(run_on_ranks(_sums_are_equal_bit_for_bit, size))) == 1


def test_a_dry_run_gets_the_shapes_of_every_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRY_RUN, "5/8")
    mesh = start(pipeline=1, data=1, tensor=8)
    try:
        with FakeTensorMode():
            x = torch.empty(4, 18, requires_grad=True)
            uneven = ((9, 2),)
            parts = collectives.scatter_sum(x, 1, mesh.tensor, uneven)
            whole = collectives.gather(parts, 1, mesh.tensor, uneven)
            exchanged = collectives.exchange(x, 0, 1, mesh.tensor, None, uneven)
            loss = collectives.sum_partials(whole.sum() + exchanged.sum(), mesh.tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            shapes = (parts.shape, whole.shape, exchanged.shape, loss.shape)
            assert shapes == ((4, 2), (4, 18), (32, 2), ())
            assert x.grad is not None
            assert x.grad.shape == (4, 18)
    finally:
        stop(mesh)


def _integers() -> list[int]:
    axis = start(pipeline=1, data=1, tensor=dist.get_world_size()).tensor
    counts = collectives.scatter_sum(torch.ones(4, dtype=torch.int32), 0, axis)
    assert counts.dtype == collectives.sum_partials(counts, axis).dtype == torch.int32
    return counts.tolist()


def test_sums_keep_their_dtype() -> None:
    assert run_on_ranks(_integers, 2) == [[2, 2], [2, 2]]


def _check_compiles() -> None:
    axis, rows = _tensor_axis(), ((4, 1),)

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = collectives.sum_partials(torch.sin(collectives.sum_gradients(x, axis)), axis)
        x = collectives.gather(collectives.scatter_sum(x, 0, axis, rows), 0, axis, rows)
        own = collectives.take_shard(x, 0, axis, rows)
        return collectives.exchange(own, 0, 1, axis, rows, ((6, 1),))

    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    found = [torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)]
    gradients = [torch.autograd.grad(one.sum(), x)[0] for one in found]
    assert torch.equal(*found)
    assert torch.equal(*gradients)


def test_compiled_code_has_its_collectives_in_one_graph() -> None:
    run_on_ranks(_check_compiles, 2)
