"""A module of torch.nn, or a function, as the whole of a model: the mean of what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.planner.model.model_file import ModelFile

Batch = dict[str, Tensor]


class Whole(nn.Module):
    """Runs one module on the batch; the loss is made of all that it gives."""

    def __init__(self, inner: nn.Module, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.run = inner, run

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the mean squares of the results."""
        given = torch.utils._pytree.tree_leaves(self.run(self.inner, x))
        return torch.stack([one.abs().square().mean() for one in given if _learns(one)]).sum()


def _learns(one: Tensor) -> bool:
    return one.is_floating_point() or one.is_complex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """How a module is built and run, and the rows that it takes."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    run: Callable[[Any, Tensor], Any] = lambda module, x: module(x)
    below: int = 0  # of whole numbers

    def batch(self, rows: int) -> Batch:
        """Return a batch of so many rows."""
        shape = (rows, *self.shape)
        return {"x": torch.randint(0, self.below, shape) if self.below else torch.rand(shape)}

    def model(self) -> nn.Module:
        """Return the model."""
        return Whole(self.build(), self.run)

    def file(self) -> ModelFile:
        """Return its model file."""
        return ModelFile(
            path=Path("multiplying.py"),
            factory="build_model",
            arguments=(),
            build_model=self.model,
            example_batch=self.batch,
            loss=None,
            build_dataset=None,
            build_optimizer=None,
            build_scheduler=None,
        )


def module(build: Callable[[], nn.Module], *shape: int, below: int = 0) -> Subject:
    """Return a module that takes x."""
    return Subject(build=build, shape=shape, below=below)


MODULES: dict[str, Subject] = {
    "Linear": module(lambda: nn.Linear(6, 5), 7, 6),
    "Conv1d": module(lambda: nn.Conv1d(4, 6, 3, padding="same"), 4, 8),
    "Conv2d": module(lambda: nn.Conv2d(4, 6, 3, padding="same"), 4, 8, 8),
    "Conv3d": module(lambda: nn.Conv3d(4, 6, 3), 4, 3, 4, 5),
    "ConvTranspose1d": module(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), 4, 8),
    "ConvTranspose2d": module(
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), 4, 8, 8
    ),
    "ConvTranspose3d": module(lambda: nn.ConvTranspose3d(4, 6, 3), 4, 3, 4, 5),
    "LSTM": module(lambda: nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True), 3, 6),
    "LSTM with a projection": module(lambda: nn.LSTM(6, 5, 2, batch_first=True, proj_size=3), 3, 6),
    "GRU": module(lambda: nn.GRU(6, 5, 3, batch_first=True), 3, 6),
    "RNN": Subject(
        build=lambda: nn.RNN(6, 5, bias=False), shape=(3, 6),
        run=lambda rnn, x: rnn(x.transpose(0, 1)),
    ),
    "LSTMCell": module(lambda: nn.LSTMCell(6, 5), 6),
    "GRUCell": module(lambda: nn.GRUCell(6, 5), 6),
    "RNNCell": module(lambda: nn.RNNCell(6, 5), 6),
    "Bilinear": Subject(
        build=lambda: nn.Bilinear(4, 5, 6), shape=(9,),
        run=lambda bilinear, x: bilinear(x[:, :4], x[:, 4:]),
    ),
    "Embedding": module(lambda: nn.Embedding(10, 4), 3, below=10),
    "EmbeddingBag": module(lambda: nn.EmbeddingBag(10, 4), 3, below=10),
    "MultiheadAttention": Subject(
        build=lambda: nn.MultiheadAttention(8, 2, batch_first=True), shape=(5, 8),
        run=lambda attention, x: attention(x, x, x)[0],
    ),
    "TransformerEncoderLayer": module(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 5, 8
    ),
    "TransformerDecoderLayer": Subject(
        build=lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), shape=(5, 8),
        run=lambda layer, x: layer(x, x),
    ),
    "TransformerEncoder": module(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2
        ), 5, 8,
    ),
    "TransformerDecoder": Subject(
        build=lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2
        ), shape=(5, 8), run=lambda layers, x: layers(x, x),
    ),
    "Transformer": Subject(
        build=lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), shape=(5, 8),
        run=lambda whole, x: whole(x, x),
    ),
    "AdaptiveLogSoftmaxWithLoss": Subject(
        build=lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10]), shape=(8,),
        run=lambda softmax, x: softmax.log_prob(x),
    ),
    "LayerNorm": module(lambda: nn.LayerNorm(6), 6),
    "RMSNorm": module(lambda: nn.RMSNorm(6), 6),
    "GroupNorm": module(lambda: nn.GroupNorm(2, 4), 4, 5),
    "BatchNorm1d": module(lambda: nn.BatchNorm1d(4), 4, 5),
    "BatchNorm2d": module(lambda: nn.BatchNorm2d(4), 4, 5, 5),
    "BatchNorm3d": module(lambda: nn.BatchNorm3d(4), 4, 5, 5, 5),
    "InstanceNorm1d": module(lambda: nn.InstanceNorm1d(4, affine=True), 4, 5),
    "InstanceNorm2d": module(lambda: nn.InstanceNorm2d(4, affine=True), 4, 5, 5),
    "InstanceNorm3d": module(lambda: nn.InstanceNorm3d(4, affine=True), 4, 5, 5, 5),
    "PReLU": module(lambda: nn.PReLU(4), 4, 5),
}  # fmt: skip
# They take the number of features from their first batch, or gather; else as those above.
ALIKE = {
    "LazyLinear", "LazyConv1d", "LazyConv2d", "LazyConv3d", "LazyConvTranspose1d",
    "LazyConvTranspose2d", "LazyConvTranspose3d", "LazyBatchNorm1d", "LazyBatchNorm2d",
    "LazyBatchNorm3d", "LazyInstanceNorm1d", "LazyInstanceNorm2d", "LazyInstanceNorm3d",
    "SyncBatchNorm",
}  # fmt: skip
# Of torch.nn, but without a parameter of their own.
HOLDERS = {"RNNBase", "RNNCellBase", "ParameterList", "ParameterDict", "DataParallel"}


class Weights(nn.ParameterList):
    """Matrices as the weights of a function."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__(nn.Parameter(torch.rand(shape)) for shape in shapes)


def function(call: Callable[..., Any], *shapes: tuple[int, ...]) -> Subject:
    """Return a function of weights as a model; the batch is multiplied in afterwards."""

    def run(weights: Any, x: Tensor) -> Any:
        made = torch.utils._pytree.tree_leaves(call(*(weight * 1 for weight in weights)))
        return [one.real * x.mean() if one.is_complex() else one * x.mean() for one in made]

    return Subject(build=lambda: Weights(*shapes), shape=(1,), run=run)
