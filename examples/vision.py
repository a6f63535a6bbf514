"""Fine-tunes a vision model of timm on a folder of images, with a subfolder for each class.

autopar plan examples/vision.py --arg base=model.safetensors --arg data=images --gpus 8 -o birds
torchrun --nproc-per-node 8 birds/train.py --steps 1000 --export birds/model.safetensors

In plain PyTorch: timm.create_model(NAME, num_classes=…, checkpoint_path="birds/model.safetensors").
"""

from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset

NAME = "vit_small_patch16_224"


class Images(Dataset[dict[str, Tensor]]):
    """The images of a folder, as a model of timm takes them, each with its subfolder's number."""

    def __init__(self, folder: str, name: str) -> None:
        settings = timm.get_pretrained_cfg(name)
        self.side = settings.input_size[-1]
        self.mean, self.std = torch.tensor(settings.mean), torch.tensor(settings.std)
        self.paths = sorted(one for one in Path(folder).rglob("*") if one.is_file())
        names = sorted({one.parent.name for one in self.paths})
        self.numbers = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path = self.paths[index]
        image = Image.open(path).convert("RGB").resize((self.side, self.side))
        pixels = torch.from_numpy(np.array(image)).float() / 255
        normal = ((pixels - self.mean) / self.std).permute(2, 0, 1)
        return {"x": normal, "label": torch.tensor(self.numbers[path.parent.name])}


def build_model(base: str, name: str = NAME, classes: int = 10) -> nn.Module:
    """Return a model with the weights of a file, and a new head for these classes."""
    model: nn.Module = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay={"file": base}, num_classes=classes
    )
    return model


def example_batch(batch_size: int, name: str = NAME, classes: int = 10) -> dict[str, Tensor]:
    """Return random images and labels."""
    sides = timm.get_pretrained_cfg(name).input_size
    return {
        "x": torch.randn(batch_size, *sides),
        "label": torch.randint(classes, (batch_size,)),
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(outputs, batch["label"])


def build_dataset(data: str, name: str = NAME) -> Dataset[dict[str, Tensor]]:
    """Return the images of a folder."""
    return Images(data, name)


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with a small rate."""
    return AdamW(params, lr=1e-4, weight_decay=0.05)
