"""The two halves of a stage's backward together give what one backward gives."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.runtime.pipeline.torch_stage import SplitBackward


class SharedScale(nn.Module):
    """Layers that all add their own weight, scaled by one that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.randn(4) for _ in range(3))
        self.shared = nn.ParameterList([torch.randn(4)])  # after the others, as torch lists them

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared[0].exp()
        for own in self.own:
            x = torch.tanh(x + own * shared)
        return x


class Pyramid(nn.Module):
    """Gives away what it computes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(x).tanh()
        return fine, self.coarse(fine)


class Normed(nn.Module):
    """Normalises an image that lies channels last, as convolutions on the CPU leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Linear(4, 4), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = self.scale(x)[:, :, None, None] * torch.ones(8, 8)
        normed: Tensor = self.norm(image.contiguous(memory_format=torch.channels_last))
        return normed


def test_a_group_norm_on_the_cpu_does_not_crash_in_the_second_half() -> None:
    stage = Normed().double()
    check_halves(stage, lambda x: (stage(x),))


def test_a_weight_that_meets_the_input_in_several_places_counts_once() -> None:
    stage = SharedScale().double()
    check_halves(stage, lambda x: (stage(x).clone(),))


def test_an_output_that_is_computed_on_with_is_there_for_the_second_half() -> None:
    stage = Pyramid().double()
    check_halves(stage, stage)


def check_halves(stage: nn.Module, run: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """Compare the two halves of a stage's backward with its backward."""
    torch.manual_seed(0)
    for parameter in stage.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 4).double().requires_grad_()
    outputs = run(x)
    above = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, above)
    expected = {name: p.grad for name, p in stage.named_parameters()}
    of_input = x.grad
    stage.zero_grad()
    x.grad = None
    split = SplitBackward(stage)
    gradients, groups = split.backward_inputs(
        stage_output=run(x), output_grads=above, input_values=[x]
    )
    split.backward_weights(groups)
    torch.testing.assert_close(gradients[0], of_input)
    torch.testing.assert_close({n: p.grad for n, p in stage.named_parameters()}, expected)
