"""Reads slices of the logical tensors of a checkpoint, whatever plan wrote them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from autopar.runtime.keeping.finding import Checkpoint
from autopar.runtime.keeping.manifest import Logical, Stored
from autopar.runtime.keeping.overlaps import Place, overlaps
from autopar.runtime.tensor.chunks import Chunks
from autopar.runtime.weights.stored_tensors import open_tensors


class Reader:
    """Reads slices of logical tensors; each file is opened once."""

    def __init__(self, checkpoint: Checkpoint, files: ExitStack) -> None:
        self.checkpoint = checkpoint
        self._files = files
        self._opened: dict[str, Any] = {}

    def logical(self, key: str) -> Logical | None:
        """Return what is known of a logical tensor, if it was kept."""
        return self.checkpoint.manifest.tensors.get(key)

    def fill(self, key: str, held: Chunks, tensor: Tensor) -> None:
        """Fill a tensor, which is those chunks of a logical one."""
        for shard in self.checkpoint.manifest.tensors[key].shards:
            for target, source in overlaps(held, shard.chunks):
                found = self.box(shard, source)
                tensor[target] = found.to(tensor.device, tensor.dtype)

    def box(self, shard: Stored, place: Place) -> Tensor:
        """Return a box of a shard; of a tensor without dims, its number."""
        found = self._file(shard.file).get_slice(shard.entry)
        box: Tensor = found[place] if place else found[...]
        return box

    def _file(self, name: str) -> Any:
        if name not in self._opened:
            path = self.checkpoint.folder / name
            self._opened[name] = self._files.enter_context(open_tensors(path))
        return self._opened[name]
