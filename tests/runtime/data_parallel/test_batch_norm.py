"""Synchronised batch norms see the batch of all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from autopar.runtime.data_parallel.batch_norm import synchronise_batch_norms, widen_norms
from autopar.runtime.ranks.mesh import start
from tests.runtime.processes import run_on_ranks

Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]


class Bounded(nn.BatchNorm2d):
    """Does more than its class, by what that does."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).tanh()


class Copied(nn.BatchNorm2d):
    """Does more than its class, as libraries do that have copied it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        statistics = (self.running_mean, self.running_var)
        output = functional.batch_norm(input, *statistics, self.weight, self.bias, self.training)
        return functional.silu(output)


def build(
    affine: bool, momentum: float | None, kind: type[nn.BatchNorm2d] = nn.BatchNorm2d
) -> nn.Sequential:
    torch.manual_seed(0)
    norm = kind(5, affine=affine, momentum=momentum)
    return nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.ReLU()).double()


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    # A mean far above the spread: sums of squares would lose digits here.
    return 100 + torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=generator)


def run(model: nn.Sequential, x: Tensor) -> Outcome:
    x = x.clone().requires_grad_()
    for _ in range(2):  # running statistics move twice
        model.zero_grad()
        x.grad = None
        output = model(x)
        (output * output.detach().cos()).sum().backward()
    assert x.grad is not None
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), x.grad, state | gradients


def run_synchronised(
    affine: bool,
    momentum: float | None,
    sizes: tuple[int, ...],
    kind: type[nn.BatchNorm2d] = nn.BatchNorm2d,
) -> Outcome:
    mesh = start(pipeline=1, data=len(sizes), tensor=1)
    model = build(affine, momentum, kind)
    names = [name for name, _ in model.named_parameters()]
    synchronise_batch_norms(model, mesh.data)
    assert names == [name for name, _ in model.named_parameters()]
    assert isinstance(model[1], nn.BatchNorm2d)
    output, gradient, state = run(model, images().split(sizes)[mesh.rank])  # type: ignore[no-untyped-call]
    for name in state:
        if name.endswith(".grad"):
            dist.all_reduce(state[name])
    return output, gradient, state


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (2, 2, 2, 2)])
def test_ranks_together_equal_one_process_on_the_whole_batch(
    affine: bool, momentum: float | None, sizes: tuple[int, ...]
) -> None:
    expected = run(build(affine, momentum), images())
    results = run_on_ranks(run_synchronised, len(sizes), affine, momentum, sizes)
    assert_together(results, expected)


def test_images_stay_channels_last() -> None:
    assert run_on_ranks(layouts, 2) == [(True, True)] * 2


def layouts() -> tuple[bool, bool]:
    mesh = start(pipeline=1, data=2, tensor=1)
    norm = nn.BatchNorm2d(3)
    synchronise_batch_norms(norm, mesh.data)
    x = images().float().to(memory_format=torch.channels_last).requires_grad_()
    output = norm(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    found = (
        one.is_contiguous(memory_format=torch.channels_last) for one in (output.detach(), gradient)
    )
    return tuple(found)  # type: ignore[return-value]


class OfDevice(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def normalised_on_a_device() -> bool:
    mesh = start(pipeline=1, data=2, tensor=1)
    norm = nn.BatchNorm2d(3)
    synchronise_batch_norms(norm, mesh.data)
    x = images().float()
    return torch.equal(norm(x.as_subclass(OfDevice)).as_subclass(Tensor), norm(x))


def test_a_device_has_no_norm_of_its_own_which_the_host_would_wait_for() -> None:
    assert run_on_ranks(normalised_on_a_device, 2) == [True, True]


@pytest.mark.parametrize("kind", [Bounded, Copied])
def test_a_norm_with_a_forward_of_its_own_keeps_it(kind: type[nn.BatchNorm2d]) -> None:
    expected = run(build(True, 0.1, kind), images())
    results = run_on_ranks(run_synchronised, 2, True, 0.1, (5, 3), kind)
    assert_together(results, expected)


def assert_together(results: list[Outcome], expected: Outcome) -> None:
    output, gradient, state = expected
    torch.testing.assert_close(torch.cat([r[0] for r in results]), output, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), gradient, rtol=0, atol=1e-11)
    for _, _, found in results:
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-9, msg=name)


def test_evaluation_uses_the_running_statistics_and_no_message() -> None:
    outputs = run_on_ranks(evaluate_on_one_rank, 2)
    model = build(True, 0.1).eval()
    assert outputs[1] is None
    torch.testing.assert_close(outputs[0], model(images()).detach())


def evaluate_on_one_rank() -> Tensor | None:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = build(True, 0.1).eval()
    synchronise_batch_norms(model, mesh.data)
    return None if mesh.rank else model(images()).detach()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("kind", "momentum"),
    [(nn.BatchNorm2d, 0.1), (nn.BatchNorm2d, None), (Bounded, 0.1), (Copied, 0.1)],
)
def test_weights_in_16_bits_compute_in_fp32_as_the_statistics_do(
    affine: bool, kind: type[nn.BatchNorm2d], momentum: float | None
) -> None:
    whole, half = (kind(3, affine=affine, momentum=momentum) for _ in range(2))
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    widen_norms(half)
    x = (images() - 100).bfloat16().requires_grad_()
    found = half(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, whole(x.float()).bfloat16())
    torch.testing.assert_close(dict(half.named_buffers()), dict(whole.named_buffers()))
    found.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in half.parameters())


def test_widened_batch_norms_evaluate_by_the_running_statistics() -> None:
    model, widened = build(True, 0.1).float().eval(), build(True, 0.1).float().eval()
    widen_norms(widened)
    torch.testing.assert_close(widened(images().float()), model(images().float()))
