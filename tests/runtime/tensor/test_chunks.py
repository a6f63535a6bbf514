"""What a process holds of a tensor, as blocks of the whole one."""

import math

import pytest
import torch

from autopar.runtime.tensor.shards import Chunks, boxes, whole

SHAPES = [(), (1,), (7,), (3, 4), (4, 1), (2, 3, 4), (0, 5), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_a_flat_range_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    for start in range(tensor.numel() + 1):
        for stop in range(start, tensor.numel() + 1):
            blocks = [
                tensor[tuple(slice(*side) for side in box)] for box in boxes(shape, start, stop)
            ]
            found = [element for block in blocks for element in block.flatten().tolist()]
            assert found == list(range(start, stop))


def test_a_box_of_a_shard_lies_where_the_shard_does() -> None:
    shard = Chunks((10, 4), (((0, 2), (6, 9)), ((1, 3),)))  # rows 0, 1, 6, 7, 8; columns 1, 2
    assert shard.within_box(((1, 4), (1, 2))) == Chunks((10, 4), (((1, 2), (6, 8)), ((2, 3),)))
    assert whole((3, 2)).within_box(((2, 3), (0, 2))).local_shape == (1, 2)
