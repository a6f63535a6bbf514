"""Turns one seed into random numbers that are equal or different where the layouts need it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._guards import detect_fake_mode

from autopar.runtime.mesh import Axis, Mesh


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one seed; unlike a sum it does not meet itself for other numbers."""
    text = "/".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


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
    seed = int(torch.randint(2**62, ()).item())
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    torch.manual_seed(mixed_seed(seed, axis.rank))
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
