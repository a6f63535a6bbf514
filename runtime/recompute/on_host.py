"""Keeps the tensors that a layer saves for its backward in the host's memory until then.

Each tensor that autograd saves in a layer's forward is copied to the host while the next layer runs
its forward, and then freed on the device. Of a recomputed layer these are its inputs. The tensors
come back while the next layer runs its backward, which is just before this layer's. So the device
holds the tensors of two layers. The last layer's tensors stay, because its backward comes next. If
something else comes next (in a pipeline, the forward of another microbatch), all tensors are copied
as soon as they are saved, from then on. On a CPU both memories are the host's.

Some tensors stay on the device: parameters, buffers, small tensors, small parts of a larger one,
and tensors that three layers or more save, such as a mask or the angles of a rotary embedding.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autopar.runtime.ranks.transport import HostLink
from autopar.runtime.recompute.running_again import Forward, wrap_forward

__all__ = ["save_on_host"]  # for scripts

_LEAST_BYTES = 1024  # starting a copy takes longer than sending this much
_MOST_PARTS = 8  # a view of less than an eighth of a tensor stays: all of it would be copied
_MOST_LAYERS = 2  # that may save one tensor: the layer that makes it, and the next one


def save_on_host(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Let layers keep the tensors that they save for their backwards in the host's memory.

    Call this after `compile_layers` and `recompute`, and before `wrap`, with the layers in the
    order in which they run. Later steps reuse the host's memory.
    """
    shared = _Shared(HostLink(device), device)
    for layer in layers:
        _save_there(layer, shared)


def _save_there(layer: nn.Module, shared: _Shared) -> None:
    def around(forward: Forward) -> Forward:
        def saving(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            run = _LayerRun(shared, layer)
            with saved_tensors_hooks(run.pack, _View.tensor_of):
                result = forward(*args, **kwargs)
            run.end()
            return result

        return saving

    wrap_forward(layer, around)


class _Shared:
    """The state that all layers of a model share."""

    def __init__(self, link: HostLink, device: torch.device) -> None:
        self.link, self.device = link, device
        self.free = defaultdict[int, list[Tensor]](list)  # unused host memory, by its bytes
        # by storage, dtype and version of its values
        self.known: weakref.WeakValueDictionary[object, _Saved] = weakref.WeakValueDictionary()
        self.latest: _LayerRun | None = None
        # the run whose forward is over, but whose tensors are still on the device
        self.on_device: _LayerRun | None = None
        self.copies_at_once = False  # when tensors are saved, and not with the next forward

    def home(self, size_bytes: int) -> Tensor:
        """Return memory of the host."""
        if free := self.free[size_bytes]:
            return free.pop()
        self.free.clear()  # memory of other sizes, which rows of other lengths would add up
        return self.link.empty(size_bytes, torch.uint8)


class _Saved:
    """A tensor that a backward needs, with its memory on the host and on the device."""

    def __init__(self, shared: _Shared, values: Tensor) -> None:
        self.here: Tensor | None = values  # on the device
        self.run: _LayerRun | None = None  # the latest run that has saved it
        self.layers = 0  # how many have saved it
        self.origin = weakref.ref(values.untyped_storage())
        self._shared, self._elements, self._dtype = shared, values.numel(), values.dtype
        self._home: Tensor | None = None  # its memory on the host, once it is sent
        self._arrival: Any = None

    def send(self) -> None:
        """Start to copy the values to the host, at the first call."""
        if self._home is None and self.here is not None:
            self._home = self._shared.home(self.here.nbytes)
            self._shared.link.copy(self.here, self._home.view(self._dtype))

    def fetch(self) -> None:
        """Start to copy the values back to the device."""
        device, link = self._shared.device, self._shared.link
        assert self._home is not None
        self.here = torch.empty(self._elements, dtype=self._dtype, device=device)
        link.copy(self._home.view(self._dtype), self.here)
        self._arrival = link.mark(comes_back=True)

    def values(self) -> Tensor:
        """Return the values on the device, which first waits for them."""
        if self.here is None:
            self.fetch()
        self._await()
        assert self.here is not None
        return self.here

    def leave(self) -> None:
        """Free the device's memory."""
        self._await()
        self.here = None

    def _await(self) -> None:
        self._shared.link.join(self._arrival)
        self._arrival = None

    def __del__(self) -> None:
        """Wait for a copy that still fills this memory, and let the host's memory be used again."""
        self._await()
        if self._home is not None:
            self._shared.free[self._home.numel()].append(self._home)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A tensor as autograd has saved it: a view of saved memory."""

    saved: _Saved
    run: _LayerRun
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any

    @staticmethod
    def tensor_of(packed: Tensor | _View) -> Tensor:
        """Return the tensor for the backward."""
        if isinstance(packed, Tensor):
            return packed
        packed.run.begin_backward()
        return packed.saved.values().as_strided(packed.size, packed.stride, packed.offset)


class _LayerRun:
    """One forward of a layer: the tensors it has saved, and the run before it."""

    def __init__(self, shared: _Shared, layer: nn.Module) -> None:
        latest = shared.latest
        self.is_waiting = True  # for its backward
        # if the latest has begun its backward, this is the first layer of another microbatch
        self._before = latest if latest is not None and latest.is_waiting else None
        self._shared = shared
        self._saved: list[weakref.ref[_Saved]] = []
        self._staying = {
            one.untyped_storage()._cdata for one in (*layer.parameters(), *layer.buffers())
        }
        self._sent: Any = None
        if shared.on_device is not None:
            shared.on_device.send()

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Save a tensor on the host; return it as it is, if it stays on the device."""
        if not self._goes(tensor):
            return tensor
        key = tensor.untyped_storage()._cdata, tensor.dtype, tensor._version
        saved = self._shared.known.get(key)
        if saved is None or saved.origin() is None:
            saved = self._shared.known[key] = _Saved(self._shared, _everything(tensor))
        if saved.run is not self:
            if saved.layers == _MOST_LAYERS:
                return tensor
            saved.run, saved.layers = self, saved.layers + 1
            self._saved.append(weakref.ref(saved))
        if self._shared.copies_at_once:
            saved.send()
        return _View(
            saved=saved,
            run=self,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
        )

    def _goes(self, tensor: Tensor) -> bool:
        if (
            is_traceable_wrapper_subclass(tensor)
            or tensor.layout is not torch.strided
            or tensor.device.type != self._shared.device.type
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        storage = tensor.untyped_storage()
        is_small = _MOST_PARTS * tensor.nbytes < storage.nbytes() or tensor.nbytes < _LEAST_BYTES
        return not is_small and storage._cdata not in self._staying

    def end(self) -> None:
        """End the forward, and free the device's memory of the run before."""
        shared = self._shared
        if shared.on_device is not None:
            shared.on_device.leave()
        shared.on_device = shared.latest = self

    def send(self) -> None:
        """Start to copy to the host all saved tensors that are not there."""
        for saved in self._living():
            saved.send()
        self._sent = self._shared.link.mark(comes_back=False)

    def leave(self) -> None:
        """Free the device's memory, once everything has arrived on the host."""
        if self._sent is None:
            self.send()
        self._shared.link.join(self._sent)
        for saved in self._living():
            if saved.run is self:  # otherwise the next layer needs it, too
                saved.leave()

    def begin_backward(self) -> None:
        """At the first call, fetch this run's tensors, then those of the run before."""
        if not self.is_waiting:
            return
        self.is_waiting, shared = False, self._shared
        if shared.on_device not in (None, self):
            shared.copies_at_once = True
            shared.on_device.leave()
        shared.on_device = None
        self._fetch()
        if self._before is not None:
            self._before._fetch()
        self._before = None

    def _fetch(self) -> None:
        for saved in self._living():
            if saved.here is None:
                saved.fetch()

    def _living(self) -> list[_Saved]:
        return [saved for one in self._saved if (saved := one()) is not None]


def _everything(tensor: Tensor) -> Tensor:
    """Return all of a tensor's memory as one row, outside of autograd."""
    values = tensor.data
    elements = values.untyped_storage().nbytes() // values.element_size()
    return values.as_strided((elements,), (1,), 0)
