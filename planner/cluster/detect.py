"""Looks at this machine: which devices of the sheet torch can see here."""

from dataclasses import replace

from autopar.planner.cluster.device import Device
from autopar.planner.cluster.sheet import canonical_name, device_sheet, find_device
from autopar.planner.errors import InputError

GIBIBYTE = 2**30


def local_devices() -> tuple[Device, ...]:
    """Return the GPUs of this machine, none where torch sees none."""
    import torch  # here alone: planning for a cluster elsewhere must not wait for torch

    if not torch.cuda.is_available():
        return ()
    properties = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    return tuple(
        recognised(
            one.name, memory_bytes=one.total_memory, multiprocessors=one.multi_processor_count
        )
        for one in properties
    )


def recognised(name: str, *, memory_bytes: int, multiprocessors: int | None = None) -> Device:
    """Return the device of the sheet that the driver calls so, with the memory that it reports.

    Some drivers leave the form factor out ("NVIDIA H100 80GB HBM3"): then the words that it
    gives must all be words of one name or alias, and of several such devices the one nearest in
    memory is meant.
    """
    device = _by_name(name) or _by_words(name, memory_bytes)
    if device is None:
        raise InputError(
            f"this machine has a {name!r}, which autopar does not know",
            fix="name a known device with --device, or describe yours, see docs/cluster-file.md",
        )
    return replace(
        device, memory_bytes=memory_bytes, multiprocessors=multiprocessors or device.multiprocessors
    )


def _by_name(name: str) -> Device | None:
    try:
        return find_device(name)
    except InputError:
        return None


def _by_words(name: str, memory_bytes: int) -> Device | None:
    model = canonical_name(name).split("-")[0]
    words = set(canonical_name(name).split("-"))
    candidates = [one for key, one in device_sheet().items() if model in key.split("-")]
    return min(
        candidates,
        key=lambda one: (
            round(abs(one.memory_bytes - memory_bytes) / (4 * GIBIBYTE)),
            len(set(one.name.split("-")) - words),
        ),
        default=None,
    )
