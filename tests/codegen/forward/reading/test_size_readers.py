"""Forwards that read the sizes of tensors are known, whatever reads them."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.nn import functional

from autopar.codegen.forward.reading.forward_source import reads_sizes


def halved(x: Tensor) -> Tensor:
    return x[: x.size(0) // 2]


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (4,)) / 2  # of which torch's own code reads the size


class Shaping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


class Calling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return halved(x)


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x)

    def scale(self, x: Tensor) -> float:
        return 1 / sum(map(self.length, (x, x)))

    @staticmethod
    def length(x: Tensor) -> int:
        return len(x)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def scaled() -> Tensor:
            return x / x.numel()

        return scaled()


@pytest.mark.parametrize("kind", [Shaping, Calling, Asking, Inner])
def test_a_forward_whose_code_or_that_of_its_helpers_reads_sizes_is_known(
    kind: type[nn.Module],
) -> None:
    assert reads_sizes(kind().forward, kind)


def test_what_torch_reads_does_not_count() -> None:
    assert not reads_sizes(Plain().forward, Plain)
