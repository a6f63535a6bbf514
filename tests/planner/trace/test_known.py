"""A model may decide by numbers that neither the batch nor a weight has a part in."""

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from tests.planner.trace.model_source import ops_of, traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x):
        positions = torch.arange(4, device=x.device).expand(x.shape[0], -1)
        ones = torch.ones(x.shape[0], 4, device=x.device)
        {before}
        if {asked}:
            return self.scale(x.sin())
        return self.scale(x.cos())

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("asked", "is_true"),
    [
        ("(positions.diff() == 1).all()", True),
        ("(positions.diff() != 1).any().item()", False),
        ("ones.all()", True),
        ("positions.max().item() > 3", False),
        ("int(ones[0].sum()) == 4", True),
        ("torch.tensor([1.0, 2.0], device=x.device).sum() > 2", True),
        ("ones.sum() == 4 * x.shape[0]", True),
    ],
)
def test_what_constants_and_sizes_tell_is_known(tmp_path: Path, asked: str, is_true: bool) -> None:
    graph = traced(tmp_path, MODEL.format(before="pass", asked=asked))
    assert [len(ops_of(graph, name)) for name in ("sin", "cos")] == [is_true, not is_true]
    assert not graph.was_noticed


@pytest.mark.parametrize(
    ("before", "asked"),
    [
        ("pass", "x.all()"),
        ("pass", "self.mask.all()"),
        ("pass", "self.scale.weight.any()"),
        ("pass", "torch.empty_like(ones).any()"),
        ("pass", "(ones * x).any()"),
        ("ones[:, 0] = x[:, 0]", "ones.all()"),
        ("ones[:, 0].copy_(x[:, 0])", "ones.all()"),
        ("pass", "positions.sum() > 45"),  # in 64 rows, but not in seven
    ],
)
def test_what_the_batch_or_the_weights_tell_is_not(tmp_path: Path, before: str, asked: str) -> None:
    with pytest.raises(TraceError, match="decides on the values of a tensor"):
        traced(tmp_path, MODEL.format(before=before, asked=asked))


def test_what_is_drawn_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="decides"):
        traced(tmp_path, MODEL.format(before="pass", asked="torch.rand_like(ones).sum() > 9"))


@pytest.mark.parametrize(
    ("before", "is_true"),
    [("ones[:, 1] = 0", False), ("ones[ones == 2] = 0", True), ("ones.mul_(0).add_(1)", True)],
)
def test_what_was_written_to_constants_is_known(
    tmp_path: Path, before: str, *, is_true: bool
) -> None:
    graph = traced(tmp_path, MODEL.format(before=before, asked="ones.all()"))
    assert [len(ops_of(graph, name)) for name in ("sin", "cos")] == [is_true, not is_true]
