"""Turns a device's sheet into the rates of each element type that a model computes in."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.cluster.device import Device
from autopar.planner.costs.kernels.compute import Sheet, Throughput, throughput
from autopar.planner.costs.kernels.constants import read_compute_constants
from autopar.planner.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of one device in one training.

    `single` are plain fp32 units, which PyTorch uses for fp32 matrix products unless it is told
    otherwise; `convolution` are the TF32 units where there are any, which it lets cuDNN use.
    """

    own: Throughput  # of the model's own floating type
    single: Throughput
    convolution: Throughput  # of fp32 convolutions
    is_cpu: bool

    def of(self, element_bytes: int) -> Throughput:
        """Return the rates of matrix products on elements of this width."""
        return self.own if element_bytes < 4 else self.single

    def of_convolution(self, element_bytes: int) -> Throughput:
        """Return the rates of convolutions on elements of this width."""
        return self.own if element_bytes < 4 else self.convolution


def rates_of(device: Device, precision: Precision) -> Rates:
    """Return the rates of a device under a precision."""
    peaks = dict(device.peaks)
    single = _throughput(device, "fp32")
    return Rates(
        own=_throughput(device, precision.value),
        single=single,
        convolution=_throughput(device, "tf32") if "tf32" in peaks else single,
        is_cpu=device.is_cpu,
    )


def _throughput(device: Device, dtype: str) -> Throughput:
    peak = device.peak_flops_per_second(dtype)
    peaks = dict(device.peaks)
    sheet = Sheet(
        architecture=device.architecture,
        peak_flops_per_second=peak,
        half_flops_per_second=peaks.get("bf16") or peaks.get("fp16") or peak,
        bytes_per_second=device.memory_bytes_per_second,
        launch_seconds=device.launch_seconds,
        power_watts=device.power_watts,
        multiprocessors=device.multiprocessors,
        cache_bytes=device.cache_bytes,
    )
    return throughput(sheet, read_compute_constants())
