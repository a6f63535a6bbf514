"""MNIST and CIFAR are read as they lie on disk, and what is malformed is named."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models_zoo.model_files import load


def idx(values: np.ndarray) -> bytes:
    extents = struct.pack(f">{values.ndim}I", *values.shape)
    return bytes([0, 0, 8, values.ndim]) + extents + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, *, count: int = 5, gzipped: bool = False) -> np.ndarray:
    images = np.random.default_rng(0).integers(256, size=(count, 28, 28))
    labels = np.arange(count) % 10
    for name, values in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        if gzipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))
    return images


@pytest.mark.parametrize("gzipped", [False, True])
def test_mnist_is_read_plain_and_gzipped(tmp_path: Path, gzipped: bool) -> None:
    images = write_mnist(tmp_path, gzipped=gzipped)
    rows = load("mnist").build_dataset(data=str(tmp_path))
    assert len(rows) == 5
    assert rows[3]["labels"] == 3
    expected = torch.from_numpy(images[3]).float() / 64 - 2
    assert torch.equal(rows[3]["images"], expected[None])


def test_a_folder_without_mnist_is_named_with_the_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither train-images-idx3-ubyte nor"):
        load("mnist").build_dataset(data=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"PNG!", "not an IDX file"),
        (b"\0\0\x08\x03\0\0", "not an IDX file"),  # the header itself is cut off
        (idx(np.zeros((5, 28, 28)))[:-1], "3919 values follow"),  # 5 · 28 · 28 − 1
        (idx(np.zeros(5)), r"images of shape \(5,\)"),
        (idx(np.zeros((4, 28, 28))), "4 images, but 5 labels"),
    ],
)
def test_malformed_images_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("mnist").build_dataset(data=str(tmp_path))


def write_cifar(folder: Path, *, largest_label: int = 9) -> np.ndarray:
    records = np.random.default_rng(0).integers(256, size=(6, 3073)).astype(np.uint8)
    records[:, 0] = [0, 1, 2, 3, 4, largest_label]
    records[:4].tofile(folder / "data_batch_1.bin")
    records[4:].tofile(folder / "data_batch_2.bin")
    return records


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_all_batches_of_cifar_are_read(tmp_path: Path, name: str) -> None:
    records = write_cifar(tmp_path)
    rows = load(name).build_dataset(data=str(tmp_path))
    assert [int(row["labels"]) for row in (rows[i] for i in range(len(rows)))] == [0, 1, 2, 3, 4, 9]
    expected = torch.from_numpy(records[5, 1:].astype(np.float32)).view(3, 32, 32) / 64 - 2
    assert torch.equal(rows[5]["images"], expected)


def test_pictures_are_resized_for_a_model_that_wants_larger_ones(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    row = load("vit").build_dataset(size="b16", data=str(tmp_path))[0]
    assert row["images"].shape == (3, 224, 224)


def test_a_folder_without_cifar_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no data_batch_\*\.bin"):
        load("resnet").build_dataset(data=str(tmp_path))


def test_a_label_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match="label 9 found; the model knows 0 to 4"):
        load("resnet").build_dataset(data=str(tmp_path), classes=5)
