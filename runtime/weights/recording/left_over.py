"""Finds the tensors of a recording that somebody still holds, wherever that is."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from autopar.runtime.tensor.contents import put_into
from autopar.runtime.weights.recording.recording import Recording


@contextmanager
def new_objects_apart() -> Iterator[None]:
    """Let the garbage collector tell objects that are made in the body from those before.

    There are some hundred thousands of those, and to look at each takes half a second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_real(recording: Recording, except_for: Collection[int]) -> None:
    """Give numbers to all recorded tensors but those of some ids.

    They are plain attributes, or lie in lists, closures, caches or other objects. Each object stays
    what it is, and those that share memory share it again.
    """
    gc.collect()  # what nobody holds is not to be made
    found = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    held = {id(one): one for one in (*found, *recording.adopted)}
    left = [
        one for key, one in held.items() if key not in except_for and recording.is_recorded(one)
    ]
    values = [recording.value(one) for one in left]
    with torch.no_grad():
        for one, made in zip(left, recording.history.replay(values), strict=True):
            put_into(one, made)
