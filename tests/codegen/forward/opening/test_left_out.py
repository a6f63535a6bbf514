"""Code that is given what printed code leaves out is printed as well."""

from __future__ import annotations

from torch import Tensor, nn

from tests.codegen.forward.reading.test_author_names import printed


class Encoder(nn.Module):
    """Gives a list, of which the loss needs the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.embed(ids)
        return [x.new_zeros(2, 0), x * 2]


class Decoder(nn.Module):
    """Asks all that it is given for its size."""

    def forward(self, features: list[Tensor]) -> Tensor:
        return features[1] + features[0].size(1)


class Skipping(nn.Module):
    """Hands a list from one module to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(ids))
        return out.square().mean()


def test_a_module_that_gets_an_output_nobody_computes_is_printed() -> None:
    sources = printed(Skipping(), opened=["encoder"])
    assert any("(Decoder)" in source for source in sources.values())
