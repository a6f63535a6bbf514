"""Files that are written tensor by tensor, as safetensors reads them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open

from autopar.runtime.checkpointing.safetensors_file import (
    Entry,
    as_bytes,
    in_file_order,
    write_tensors,
)
from autopar.runtime.weights.stored_tensors import KINDS


def test_what_is_written_tensor_by_tensor_is_read_as_it_was(tmp_path: Path) -> None:
    tensors = {
        str(kind): torch.arange(6).remainder(2).view(2, 3).to(kind).t() for kind in KINDS
    } | {"none": torch.ones(0, 3), "one": torch.tensor(2.5)}
    entries = in_file_order(
        Entry(name=name, dtype=value.dtype, shape=tuple(value.shape))
        for name, value in tensors.items()
    )
    path = tmp_path / "x.safetensors"
    written = write_tensors(path, entries, (tensors[one.name] for one in entries), {"a": "b"})
    assert written.size_bytes == path.stat().st_size
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "b"}
        for name, value in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype is value.dtype
            assert torch.equal(as_bytes(found), as_bytes(value))
