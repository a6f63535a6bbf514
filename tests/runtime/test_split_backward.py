"""The two halves of a stage's backward together give what one backward gives."""

import torch
from torch import Tensor, nn

from autopar.runtime.split_backward import SplitBackward


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


def test_a_weight_that_meets_the_input_in_several_places_counts_once() -> None:
    torch.manual_seed(0)
    stage, x, above = SharedScale().double(), torch.randn(2, 4).double(), torch.randn(2, 4).double()
    x.requires_grad_()
    stage(x).backward(above)
    expected = {name: p.grad for name, p in stage.named_parameters()}
    of_input = x.grad
    stage.zero_grad()
    x.grad = None
    split = SplitBackward(stage)
    gradients, groups = split.backward_inputs(
        stage_output=[stage(x).clone()], output_grads=[above], input_values=[x]
    )
    split.backward_weights(groups)
    torch.testing.assert_close(gradients[0], of_input)
    torch.testing.assert_close({n: p.grad for n, p in stage.named_parameters()}, expected)
