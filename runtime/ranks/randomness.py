"""Turns one seed into random numbers that are equal or different where the layouts need it."""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._guards import detect_fake_mode

from autopar.runtime.ranks.mesh import Axis, Mesh


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one seed; unlike a sum it does not meet itself for other numbers."""
    text = "/".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_numbers(seed: int) -> None:
    """Seed all that Python code draws from on a CPU: torch, Python and numpy, if it is there."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def kept_numbers() -> Iterator[None]:
    """Leave these generators as they were."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let numbers that are drawn here be the same in every process, those of devices too."""
    has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if has_device else []
    with kept_numbers(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        seed_numbers(seed)
        yield


def seed_all(seed: int, mesh: Mesh) -> None:
    """Seed this process: equal along the tensor axis, different along data and pipeline."""
    torch.manual_seed(mixed_seed(seed, mesh.data.rank, mesh.pipeline.rank))


@contextmanager
def split_randomness(axis: Axis) -> Iterator[None]:
    """Let random numbers inside differ from rank to rank, as the masks of split tensors must.

    The seed is drawn from the CPU generator, which is in the same state on every rank of the axis
    and which activation recomputation sets back, so a recomputed region gets the same masks.
    """
    if axis.size == 1 or detect_fake_mode() is not None:  # fake tensors hold no numbers to seed by
        yield
        return
    seed = mixed_seed(int(torch.randint(2**62, ()).item()), axis.rank)
    generators = _generators()
    states = [one.get_state() for one in generators]
    for one in generators:
        one.manual_seed(seed)
    try:
        yield
    finally:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)


def _generators() -> list[torch.Generator]:
    """Return what ops here draw from: torch.manual_seed seeds all devices, which takes 0.1 ms."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found
