import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

from autopar.runtime.model.parts import shard_parameters
from autopar.runtime.ranks.mesh import Axis, start
from autopar.runtime.tensor.shards import (
    Chunks,
    Split,
    chunks_by_name,
    has_plain_memory,
    local_part,
    local_size,
    within,
)
from autopar.runtime.tensor.slices import Parts, cut
from tests.runtime.processes import run_on_ranks

FUSED = Split(0, ((3, 2), (3, 2), (3, 2)))  # q, k and v of three heads of two


def test_the_shard_of_a_concat_is_the_concat_of_the_shards() -> None:
    whole, axis = torch.arange(18), Axis(0, 2, None)
    first, second = FUSED.cut(whole.shape, axis).ranges
    assert first == ((0, 4), (6, 10), (12, 16))
    assert second == ((4, 6), (10, 12), (16, 18))
    assert local_part(whole, FUSED, Axis(1, 2, None)).tolist() == [4, 5, 10, 11, 16, 17]


def test_a_split_without_parts_cuts_single_elements() -> None:
    whole = torch.arange(7)
    found = [local_part(whole, Split(0), Axis(rank, 3, None)).tolist() for rank in range(3)]
    assert found == [[0, 1, 2], [3, 4], [5, 6]]


@given(
    parts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=3),
    size=st.integers(1, 5),
)
def test_the_ranks_hold_every_element_once_and_whole_blocks(
    parts: list[tuple[int, int]], size: int
) -> None:
    held = cut(tuple(parts), size)
    elements = [i for rank in held.ranges for low, high in rank for i in range(low, high)]
    assert sorted(elements) == list(range(sum(count * unit for count, unit in parts)))
    if len(parts) == 1:
        assert max(held.sizes) - min(held.sizes) <= parts[0][1]
        assert held.is_even == (len(set(held.sizes)) == 1)


@pytest.mark.parametrize(("parts", "sizes"), [(((5, 1),), (2, 2, 1)), (((2, 4),), (4, 4, 0))])
def test_the_first_ranks_take_the_blocks_that_are_left_over(
    parts: Parts, sizes: tuple[int, ...]
) -> None:
    assert tuple(local_size(parts, Axis(rank, 3, None)) for rank in range(3)) == sizes


def test_parts_that_do_not_fill_the_dim_are_refused() -> None:
    with pytest.raises(ValueError, match=r"add up to 18"):
        local_part(torch.zeros(17), FUSED, Axis(0, 2, None))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(4, 2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_names_of_a_tied_parameter_get_the_same_shard(device: str) -> None:
    with torch.device(device):
        model = _Tied()
    splits = {"head.weight": Split(0, ((7, 1),)), "norm.running_mean": Split(0, ((6, 1),))}
    shard_parameters(model, splits, Axis(1, 2, None))
    assert model.embedding.weight is model.head.weight
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight.shape == (3, 4)
    assert isinstance(model.norm.running_mean, torch.Tensor)
    assert model.norm.running_mean.shape == (3,)
    assert "norm.running_mean" in dict(model.named_buffers())
    chunks = chunks_by_name(model)
    assert chunks["embedding.weight"] == Chunks((7, 4), (((4, 7),), ((0, 4),)))
    assert chunks["embedding.weight"].local_shape == (3, 4)
    assert chunks["norm.weight"] == Chunks((6,), (((0, 6),),))


def test_a_star_in_a_name_stands_for_the_number_of_a_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
    shard_parameters(model, {"*.weight": Split(0)}, Axis(0, 2, None))
    assert [tuple(one.shape) for one in model.parameters()] == [(2, 2), (4,), (3, 4), (6,)]


def test_a_recurrent_layer_sees_its_new_parameters() -> None:
    model = _Tied()
    shard_parameters(model, {"lstm.bias_ih_l0": Split(0, ((4, 2),))}, Axis(0, 2, None))
    assert model.lstm._flat_weights[2] is model.lstm.bias_ih_l0


def test_a_wrong_name_and_a_tie_cut_in_two_ways_are_refused() -> None:
    axis, split = Axis(0, 2, None), Split(0, ((7, 1),))
    with pytest.raises(KeyError, match=r"head\.wait"):
        shard_parameters(_Tied(), {"head.wait": split}, axis)
    two = {"head.weight": split, "embedding.weight": Split(1, ((4, 1),))}
    with pytest.raises(ValueError, match="one tensor"):
        shard_parameters(_Tied(), two, axis)


def test_a_range_of_a_shard_is_found_in_the_whole() -> None:
    assert within(((4, 6), (10, 12), (16, 18)), 1, 5) == ((5, 6), (10, 12), (16, 17))
    assert within(((4, 6),), 2, 2) == ()


def _rows_after_fully_shard() -> dict[str, Chunks]:
    mesh = start(pipeline=1, data=2, tensor=2)
    model = nn.Linear(4, 18)
    shard_parameters(model, {"weight": FUSED}, mesh.tensor)
    fully_shard(model, mesh=mesh.device_mesh["shard"])
    chunks = chunks_by_name(model)
    for name, parameter in model.named_parameters():
        assert chunks[name].local_shape == parameter.to_local().shape  # type: ignore[attr-defined]
    return chunks


def test_the_rows_of_fully_shard_compose_with_the_tensor_axis() -> None:
    held = run_on_ranks(_rows_after_fully_shard, 4)
    rows = [
        i for chunks in held for low, high in chunks["weight"].ranges[0] for i in range(low, high)
    ]
    assert sorted(rows) == list(range(18))
    assert held[0]["weight"].ranges[0] == ((0, 4), (6, 8))
    assert held[3]["weight"] == Chunks((18, 4), (((11, 12), (16, 18)), ((0, 4),)))


def test_the_process_group_is_not_needed_to_cut() -> None:
    assert not dist.is_initialized()
    assert local_part(torch.arange(4), Split(0, ((4, 1),)), Axis(0, 2, None)).tolist() == [0, 1]


def test_a_tensor_that_is_mapped_over_rows_has_no_plain_memory() -> None:
    found = list[bool]()

    def row(one: torch.Tensor) -> torch.Tensor:
        found.append(has_plain_memory(one))
        return one

    rows = torch.ones(2, 3)
    torch.vmap(row)(rows)
    assert found == [False]
    assert has_plain_memory(rows)
