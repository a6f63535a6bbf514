"""What one Hugging Face family is to the tests: a tiny model, a batch with labels, sizes."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model of one family; `sizes` lists, per axis name, the sizes that axis has in it.

    The sizes are chosen apart from each other wherever the architecture lets us, so that an axis
    taken for another one shows. A name has several sizes where stages differ (Swin, ResNet).
    """

    name: str
    model_class: Callable[[Any], nn.Module]
    config: Any
    inputs: Callable[[int], Batch]
    sizes: Mapping[str, tuple[int, ...]]

    def build_model(self) -> nn.Module:
        """Builds the model in training mode, on the current default device and dtype."""
        return self.model_class(copy.deepcopy(self.config)).train()

    def example_batch(self, batch_size: int) -> Batch:
        """Makes a batch whose forward returns a loss; floats have the default dtype."""
        return self.inputs(batch_size)


def token_ids(batch_size: int, length: int, vocab: int) -> Tensor:
    """Draws token numbers; small numbers are left out because families reserve them."""
    return torch.randint(4, vocab - 4, (batch_size, length))


def class_ids(batch_size: int, classes: int) -> Tensor:
    """Draws one class for each row of the batch."""
    return torch.randint(0, classes, (batch_size,))
