"""Any image classifier of timm, on small images."""

from __future__ import annotations

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

LABELS, SIDE = 5, 64
OF_ONE_SIDE = {"efficientformer_l1": 224, "halonet_h1": 256}


def build_model(kind: str) -> nn.Module:
    """Build a model of a name, with nothing drawn in its forward."""
    is_told = timm.get_pretrained_cfg(kind).fixed_input_size and kind not in OF_ONE_SIDE
    sized = {"img_size": SIDE} if is_told else {}
    model: nn.Module = timm.create_model(kind, num_classes=LABELS, **sized)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            vars(module)["drop_prob"] = 0.0
    return model


def example_batch(batch_size: int, kind: str) -> dict[str, Tensor]:
    """Make random images with labels."""
    side = OF_ONE_SIDE.get(kind, SIDE)
    images = torch.randn(batch_size, 3, side, side)
    return {"x": images, "labels": torch.randint(LABELS, (batch_size,))}


def loss(outputs: Tensor | tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of the head, or of all of them together."""
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([functional.cross_entropy(head, batch["labels"]) for head in heads]).sum()
