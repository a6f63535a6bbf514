"""Reads MNIST and CIFAR files, or generates pictures, as normalised images with labels."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

Bytes = npt.NDArray[np.uint8]

CIFAR_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes
CIFAR_CLASSES = 10
PROTOTYPES = 10  # classes of the generated pictures
PATCHES = 4  # a generated picture is a grid of 4 × 4 coloured patches under noise


class LabelledImages(Dataset[dict[str, Tensor]]):
    """Pictures of 8 bits per colour, resized to `image_size` and scaled to about unit variance."""

    def __init__(self, images: Bytes, labels: Bytes, image_size: int, classes: int) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, but {len(labels)} labels")
        if len(labels) and labels.max() >= classes:
            raise ValueError(f"label {labels.max()} found; the model knows 0 to {classes - 1}")
        self.images, self.labels, self.image_size = images, labels, image_size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = torch.from_numpy(self.images[index].astype(np.float32)) / 64 - 2
        if image.shape[-1] != self.image_size:
            size = (self.image_size, self.image_size)
            image = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
        return {"images": image, "labels": torch.tensor(int(self.labels[index]))}


class PrototypeImages(Dataset[dict[str, Tensor]]):
    """One pattern of coloured patches per class, under noise that depends on the index alone."""

    def __init__(self, channels: int, image_size: int, classes: int, items: int) -> None:
        random = np.random.default_rng(0)
        grid = random.standard_normal((min(classes, PROTOTYPES), channels, PATCHES, PATCHES))
        patterns = torch.from_numpy(grid.astype(np.float32))
        self.prototypes = F.interpolate(patterns, (image_size, image_size), mode="nearest")
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.items:
            raise IndexError(index)
        label = index % len(self.prototypes)
        noise = np.random.default_rng((1, index)).standard_normal(self.prototypes[label].shape)
        image = self.prototypes[label] + torch.from_numpy(noise.astype(np.float32)) / 2
        return {"images": image, "labels": torch.tensor(label)}


def read_mnist(folder: str) -> tuple[Bytes, Bytes]:
    """Read the training images [N, 1, 28, 28] and labels [N] of MNIST, plain or gzipped."""
    images = read_idx(existing(folder, "train-images-idx3-ubyte"))
    labels = read_idx(existing(folder, "train-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1:
        raise ValueError(f"{folder}: images of shape {images.shape}, labels of {labels.shape}")
    return images[:, None], labels


def existing(folder: str, name: str) -> Path:
    """Return the file `name` or `name.gz` in `folder`."""
    for file in (Path(folder, name), Path(folder, f"{name}.gz")):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{folder}: holds neither {name} nor {name}.gz")


def read_idx(file: Path) -> Bytes:
    """Read an IDX file of unsigned bytes: 0 0 8 rank, the extents in 4 bytes each, the values."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file}: not a whole gzip file ({error})") from error
    header = 4 + 4 * content[3] if len(content) > 3 else 4
    if content[:3] != b"\x00\x00\x08" or len(content) < header:
        raise ValueError(f"{file}: not an IDX file of unsigned bytes (begins {content[:4].hex()})")
    shape: Any = tuple(int(extent) for extent in np.frombuffer(content[4:header], dtype=">u4"))
    if len(content) != header + math.prod(shape):
        raise ValueError(f"{file}: the header says {shape}, {len(content) - header} values follow")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def read_cifar10(folder: str) -> tuple[Bytes, Bytes]:
    """Read the images [N, 3, 32, 32] and labels [N] of CIFAR-10's binary version."""
    files = sorted(Path(folder).glob("data_batch_*.bin"))
    if not files:
        raise FileNotFoundError(f"{folder}: holds no data_batch_*.bin (CIFAR-10, binary version)")
    records = np.concatenate([read_cifar10_batch(file) for file in files])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_cifar10_batch(file: Path) -> Bytes:
    """Read one batch as rows of a label and 3072 colour values."""
    content = np.fromfile(file, dtype=np.uint8)
    if not len(content) or len(content) % CIFAR_RECORD:
        raise ValueError(f"{file}: {len(content)} bytes are no multiple of {CIFAR_RECORD}")
    records = content.reshape(-1, CIFAR_RECORD)
    if records[:, 0].max() >= CIFAR_CLASSES:
        raise ValueError(f"{file}: label {records[:, 0].max()} found; CIFAR-10 has 0 to 9")
    return records
