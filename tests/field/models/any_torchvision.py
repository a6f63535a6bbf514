"""Any classifier or segmenter of torchvision, of images or of films."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

LABELS = 5
FILMS = ("r3d", "mc3", "r2plus1d", "s3d", "mvit", "swin3d")
SEGMENTERS = ("fcn", "deeplabv3", "lraspp")
SIDES = {"inception_v3": 160, "maxvit_t": 224, "alexnet": 80}


def build_model(kind: str) -> nn.Module:
    """Build a model of a name, with nothing drawn in its forward."""
    given: dict[str, Any] = {"weights": None, "num_classes": LABELS}
    if kind.startswith(SEGMENTERS):
        given["weights_backbone"] = None
    if kind in ("googlenet", "inception_v3"):
        given["init_weights"] = False
    if kind.startswith("vit"):
        given["image_size"] = 64
    model: nn.Module = torchvision.models.get_model(kind, **given)
    for module in model.modules():
        if isinstance(module, (nn.Dropout, torchvision.ops.StochasticDepth)):
            module.p = 0.0
    return model


def example_batch(batch_size: int, kind: str) -> dict[str, Tensor]:
    """Make random images or films, with labels of the whole or of each pixel."""
    is_film = kind.startswith(FILMS)
    side = 32 if is_film else SIDES.get(kind, 64)
    frames = (8,) if is_film else ()
    pixels = (side, side) if kind.startswith(SEGMENTERS) else ()
    first = "input" if kind.startswith("lraspp") else "x"
    return {
        first: torch.randn(batch_size, 3, *frames, side, side),
        "labels": torch.randint(LABELS, (batch_size, *pixels)),
    }


def loss(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of all heads together."""
    heads = outputs.values() if isinstance(outputs, dict) else outputs
    heads = (outputs,) if isinstance(outputs, Tensor) else heads
    given = [functional.cross_entropy(head, batch["labels"]) for head in heads if head is not None]
    return torch.stack(given).sum()
