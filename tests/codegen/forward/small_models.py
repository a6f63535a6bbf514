"""Small models with one difficulty each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planner.model.model_file import ModelFile


class Shifted(nn.Module):
    """Predicts each next token; the token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))[:, :-1]
        return functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].reshape(-1), ignore_index=0
        )


class Hostile(nn.Module):
    """Has children and parameters whose names would be code, if they were printed as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a b", nn.Linear(4, 4))
        self.add_module("x)\n__import__('os')#", nn.Linear(4, 4))
        self.parts = nn.ModuleDict({'say "hi"': nn.Linear(4, 4), "class": nn.Linear(4, 4)})
        self.register_parameter("odd name", nn.Parameter(torch.ones(4)))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float()
        for child in (
            self._modules["a b"],
            *list(self._modules.values())[1:2],
            *self.parts.values(),
        ):
            assert child is not None
            x = child(x)
        weight = self._parameters["odd name"]
        assert weight is not None
        return (x * weight).square().mean()


class Ended(nn.Module):
    """Gives its result as the first of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.out(x)]


class Listing(nn.Module):
    """Concatenates the lists of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(8, 4), Ended(), Ended()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        found = [x] + self.first(x) + self.second(x)  # noqa: RUF005 (a list alone)
        return torch.stack(found).square().mean()


class Turned(nn.Module):
    """Takes what it splits by a name that its signature does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 4)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        sine, cosine = more["angles"].chunk(2, dim=-1)
        scale: Tensor = self.out(sine)
        return x * scale + cosine.sum(-1, keepdim=True)


class Turning(nn.Module):
    """Gives a child what it calls by a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(8, 4), Turned()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        turned: Tensor = self.first(x, angles=x.tanh())
        return turned.square().mean()


class Moved(nn.Module):
    """Adds what a dict has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: dict[str, Tensor | None]) -> Tensor:
        shift, scale = given["the shift"], given.get("scale")
        assert shift is not None
        x = self.out(x + shift)
        return x if scale is None else x * scale


class Keying(nn.Module):
    """Hands its children dicts, of a tensor and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(8, 4), Moved(), Moved()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        given = {"the shift": x.mean(dim=1, keepdim=True), "scale": None}
        x = self.second(self.first(x, given), given={**given, "scale": x})
        out: Tensor = x.square().mean()
        return out


class Numbering(nn.Module):
    """Makes a tensor of many numbers at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 65)

    def forward(self, ids: Tensor) -> Tensor:
        scales = torch.tensor([0.5] * 65, device=ids.device)
        out: Tensor = (self.embed(ids) * scales).square().mean()
        return out


class Weighing(nn.Module):
    """Takes what it is given by position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, *args: Tensor) -> Tensor:
        x, weights = args
        out: Tensor = self.out(x * weights)
        return out


class Repeating(nn.Module):
    """Gives the same weights to equal children in a row, and needs what the first was given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Weighing(), Weighing(), Weighing()])

    def forward(self, ids: Tensor) -> Tensor:
        weights = self.embed(ids.flip(-1))
        begun = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, weights)
        out: Tensor = (x * begun).square().mean()
        return out


class Remembering(nn.Module):
    """Begins with the state that the call before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x) if self.state is None else self.state
        self.state = state + self.out(x)
        return self.state


class Resetting(nn.Module):
    """Has its child forget between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(8, 4), Remembering()

    def forward(self, ids: Tensor) -> Tensor:
        self.inner.state = None
        out: Tensor = self.inner(self.embed(ids))
        return out.square().mean()


class Denoising(nn.Module):
    """Draws steps that all layers read, and noise for its first layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.steps = nn.Embedding(8, 4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        step = torch.randint(0, 5, (ids.shape[0], 1))
        noise = torch.randn(ids.shape[0], 4, 4, dtype=self.embed.weight.dtype)
        x = self.embed(ids) + noise
        for layer in self.layers:
            x = layer(x, self.steps(step).expand_as(x).contiguous())
        return functional.mse_loss(x, noise)


class Layered(nn.Module):
    """Whole numbers, three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class Masking(Layered):
    """Fills what it has made with random numbers, for its first layer and its loss."""

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.empty(ids.shape[0], 4, 4)
        mask.uniform_()
        x = self.embed(ids) * mask
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(x, mask)


class Adding(Layered):
    """Adds what each layer makes to what it began with, in place."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x)
            total += x
        loss: Tensor = (total * x).mean()
        return loss


class AddingToViews(Adding):
    """Reads what it has added by a view from before the last layer."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        total = self.layers[0](x)
        part = total[:, 1:]
        total += self.layers[1](total)
        x = self.layers[2](total)
        total += x
        loss: Tensor = (part * x[:, 1:]).mean()
        return loss


def file_of(kind: Callable[[], nn.Module]) -> ModelFile:
    """Return a model file that builds a small model and gives it whole numbers."""
    return ModelFile(
        path=Path("small.py"),
        factory="build_model",
        arguments=(),
        build_model=kind,
        example_batch=lambda rows: {"ids": torch.arange(rows * 4).reshape(rows, 4) % 8},
        loss=None,
        build_dataset=None,
        build_optimizer=None,
        build_scheduler=None,
    )
