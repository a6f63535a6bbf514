"""Turns a device's data sheet into the rates that its kernels reach."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.toml_reading import shipped
from autopar.planner.errors import InputError
from autopar.planner.precision import Float8, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConstants:
    """Constants of matrix kernels: shares of the peak, tiles, and times per wave.

    See efficiency.toml for their meaning.
    """

    issue_fraction: float
    half_tile: float
    wave_seconds: float
    store_exposed: float
    balance_traffic: float
    tiles: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConstants:
    """Constants of fused attention kernels on every device; see efficiency.toml."""

    backward_flops: float
    wide_head_dim: int
    wide_forward: float
    wide_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConstants:
    """The bandwidth that each kind of memory access reaches, relative to a streaming kernel."""

    cross_entropy: float
    gather: float
    casting: float
    strided: float
    strided_join: float
    row_sum: float
    many_tensors: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConstants:
    """Constants of the kernels of norms; see efficiency.toml for their meaning."""

    forward: float
    backward: float
    row_seconds: float
    column_seconds: float
    plane_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormConstants:
    """Constants of one library's batch norm kernels; see efficiency.toml for their meaning."""

    statistics: float
    gradient: float
    plane: float
    apply: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Facts about one generation of hardware; see efficiency.toml for their meaning."""

    joules_per_flop: float
    stream_fraction: float
    multiprocessors: int
    cache_bytes: int
    cache_speedup: float
    attention_forward: float
    attention_backward: float
    forward_tail_rows: float
    backward_tail_rows: float
    softmax_dims: float
    query_block: int
    operand_loads: str
    exponentials_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConstants:
    """The constants of efficiency.toml."""

    gemm: Mapping[str, GemmConstants]  # keys: gpu, cpu
    attention: AttentionConstants
    access: Mapping[str, AccessConstants]  # keys: gpu, cpu
    norm: Mapping[str, NormConstants]  # keys: gpu, cpu
    batch_norm: Mapping[str, BatchNormConstants]  # keys: native, library; both on a GPU
    alignment: Mapping[str, tuple[tuple[int, float], ...]]  # keys: words, bulk (kinds of loads)
    architectures: Mapping[str, Architecture]

    def architecture(self, name: str) -> Architecture:
        """Return the facts of a generation; "Blackwell Ultra" is found under "blackwell"."""
        for known in sorted(self.architectures, key=len, reverse=True):
            if name.casefold().startswith(known):
                return self.architectures[known]
        near = difflib.get_close_matches(name.casefold(), self.architectures, n=1)
        raise InputError(
            f"the device architecture {name!r} is not known",
            expected=f"one of {', '.join(self.architectures)}",
            fix=f"did you mean {near[0]!r}?" if near else "name the nearest generation",
        )


@cache
def read_compute_constants() -> ComputeConstants:
    """Return the constants that autopar ships."""
    table = shipped("costs.kernels", "efficiency.toml")
    return ComputeConstants(
        gemm=_rows(table["gemm"], _gemm),
        attention=AttentionConstants(**table["attention"]),
        access=_rows(table["access"], AccessConstants),
        norm=_rows(table["norm"], NormConstants),
        batch_norm=_rows(table["batch_norm"], BatchNormConstants),
        alignment=_rows(table["alignment"], _shares),
        architectures=_rows(table["architecture"], Architecture),
    )


Constants = TypeVar("Constants")


def _rows(
    table: Mapping[str, dict[str, Any]], row: Callable[..., Constants]
) -> Mapping[str, Constants]:
    return MappingProxyType({name: row(**values) for name, values in table.items()})


def _gemm(tiles: Sequence[Sequence[int]], **others: float) -> GemmConstants:
    return GemmConstants(tiles=tuple((rows, columns) for rows, columns in tiles), **others)


def _shares(**by_size: float) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), share) for size, share in by_size.items())


class Tile(NamedTuple):
    """An output tile of matrix kernels, with its times on one multiprocessor."""

    rows: int
    columns: int
    seconds_per_depth: float  # of one step along k, for the whole tile
    balance_seconds: float  # to spread a last, partly filled wave over all multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The rates of a device at one dtype, passed to every formula."""

    peak_flops_per_second: float
    sustained_flops_per_second: float
    sheet_bytes_per_second: float
    stream_bytes_per_second: float
    cache_bytes: int
    exponentials_per_second: float
    launch_seconds: float
    multiprocessors: int
    tiles: tuple[Tile, ...]
    wave_seconds: float
    store_exposed: float
    alignment: tuple[tuple[int, float], ...]  # bytes of alignment, share of the rate
    access: AccessConstants
    norm: NormConstants
    native_batch_norm: BatchNormConstants  # PyTorch's own kernels
    library_batch_norm: BatchNormConstants  # cuDNN's
    architecture: Architecture
    attention: AttentionConstants


def sustained_fraction(
    power_watts: float | None, half_flops: float, joules_per_flop: float
) -> float:
    """Return the share of peak that a device can sustain under its power limit.

    fraction = min(1, watts ÷ (joules per 16-bit FLOP · 16-bit peak)). FLOPs per joule grow with the
    peak of a dtype, so one fraction serves all dtypes of tensor cores. Fitted on A100 at 300 W and
    B200 at 1000 W. Leaves out: that a short cold run is not throttled, that data with few set bits
    costs less, cooling, and that plain fp32 units use more energy per FLOP.
    """
    if power_watts is None:
        return 1.0
    return min(1.0, power_watts / (joules_per_flop * half_flops))


def throughput(device: Device, dtype: str, constants: ComputeConstants | None = None) -> Throughput:
    """Return the rates that kernels reach on a device, with its products at a dtype."""
    constants = constants or read_compute_constants()
    facts = constants.architecture(device.architecture)
    kind = "cpu" if device.is_cpu else "gpu"
    gemm, peaks = constants.gemm[kind], dict(device.peaks)
    peak = device.peak_flops_per_second(dtype)
    half = peaks.get("bf16") or peaks.get("fp16") or peak
    units = device.multiprocessors or facts.multiprocessors
    stream = device.memory_bytes_per_second * facts.stream_fraction
    return Throughput(
        peak_flops_per_second=peak,
        sustained_flops_per_second=peak
        * sustained_fraction(device.power_watts, half, facts.joules_per_flop),
        sheet_bytes_per_second=device.memory_bytes_per_second,
        stream_bytes_per_second=stream,
        cache_bytes=device.cache_bytes or facts.cache_bytes,
        exponentials_per_second=units * facts.exponentials_per_second,
        launch_seconds=device.launch_seconds,
        multiprocessors=units,
        tiles=_tiles(gemm, peak=peak, units=units, stream=stream),
        wave_seconds=gemm.wave_seconds,
        store_exposed=gemm.store_exposed,
        alignment=constants.alignment[facts.operand_loads],
        access=constants.access[kind],
        norm=constants.norm[kind],
        native_batch_norm=constants.batch_norm["native"],
        library_batch_norm=constants.batch_norm["library"],
        architecture=facts,
        attention=constants.attention,
    )


def _tiles(gemm: GemmConstants, *, peak: float, units: int, stream: float) -> tuple[Tile, ...]:
    """Return the tiles with their times.

    A tile of r × c reads r + c operand elements per r·c multiply-adds, so it runs at 1 ÷ (1 +
    h·(1/r + 1/c)) of the issue rate, where h is `half_tile`. To spread the last wave over all
    multiprocessors, the kernel writes and reads one wave of partial tiles in fp32.
    """
    unit_rate = gemm.issue_fraction * peak / units
    return tuple(
        Tile(
            rows=rows,
            columns=columns,
            seconds_per_depth=2
            * rows
            * columns
            * (1 + gemm.half_tile * (1 / rows + 1 / columns))
            / unit_rate,
            balance_seconds=gemm.balance_traffic * 8 * units * rows * columns / stream,
        )
        for rows, columns in gemm.tiles
    )


def aligned_share(
    contiguous: int, element_bytes: float, alignment: tuple[tuple[int, float], ...]
) -> float:
    """Return the share of its rate that a product reaches if rows have this many elements.

    `contiguous` may be the bitwise or of several extents: its lowest set bit is the alignment of
    the least aligned one.
    """
    reach = (contiguous & -contiguous) * element_bytes
    return next((share for size, share in alignment if reach >= size), alignment[-1][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of a device in one training.

    `single` has the rates of fp32 matrix products: on plain fp32 units, PyTorch's default, unless
    the precision allows TF32. `convolution` has those of fp32 convolutions: on TF32 units, cuDNN's
    default, if the device has any. `float8` has those of float8 products; without such products it
    equals `own`.
    """

    own: Throughput  # at the plan's precision (--precision)
    single: Throughput
    convolution: Throughput
    float8: Throughput
    is_cpu: bool

    def of(self, element_bytes: int) -> Throughput:
        """Return the rates of matrix products on elements of this width."""
        return self.own if element_bytes < 4 else self.single

    def of_convolution(self, element_bytes: int) -> Throughput:
        """Return the rates of convolutions on elements of this width."""
        return self.own if element_bytes < 4 else self.convolution


def rates_of(device: Device, precision: Precision, float8: Float8 = Float8.NONE) -> Rates:
    """Return the rates of a device under a precision."""
    peaks, own = dict(device.peaks), throughput(device, precision.units)
    single = throughput(device, precision.units if precision.products else "fp32")
    return Rates(
        own=own,
        single=single,
        convolution=throughput(device, "tf32") if "tf32" in peaks else single,
        float8=own if float8 is Float8.NONE else throughput(device, float8.units),
        is_cpu=device.is_cpu,
    )
