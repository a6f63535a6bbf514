"""Turns a device's data sheet into the rates that kernels reach."""

from dataclasses import dataclass
from typing import NamedTuple

from autopar.planner.costs.kernels.constants import (
    AccessConstants,
    Architecture,
    AttentionConstants,
    ComputeConstants,
    GemmConstants,
)


class Tile(NamedTuple):
    """One shape of output tile of matrix kernels, with its times on one multiprocessor."""

    rows: int
    columns: int
    seconds_per_depth: float  # of one multiply-add over the whole tile
    balance_seconds: float  # to spread a last, partly filled wave over all multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """What a data sheet says of one device at one dtype; `half` is its 16-bit peak."""

    architecture: str
    peak_flops_per_second: float
    half_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    power_watts: float | None = None
    multiprocessors: int | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The rates of one device at one dtype, made once and passed to every formula."""

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
    architecture: Architecture
    attention: AttentionConstants


# An L2 serves about three times the bandwidth of the memory behind it (A100: 5 TB/s against 1.9;
# H100: 7.5 against 3.4).
CACHE_SPEEDUP = 3.0


def sustained_fraction(
    power_watts: float | None, half_flops: float, joules_per_flop: float
) -> float:
    """Return the share of peak that the power limit allows a device to hold.

    fraction = min(1, watts ÷ (joules per 16-bit FLOP · 16-bit peak)). Narrower dtypes do more FLOPs
    per joule in the proportion of their peaks, so the fraction serves all tensor dtypes. Fitted on
    A100 at 300 W and B200 at 1000 W; leaves out: that a short cold run is not throttled, that data
    with few set bits costs less, cooling, and that plain fp32 units use more energy per FLOP.
    """
    if power_watts is None:
        return 1.0
    return min(1.0, power_watts / (joules_per_flop * half_flops))


def throughput(sheet: Sheet, constants: ComputeConstants) -> Throughput:
    """Return the rates that kernels reach on a device of this sheet."""
    facts = constants.architecture(sheet.architecture)
    gemm = constants.gemm(sheet.architecture.casefold())
    units = sheet.multiprocessors or facts.multiprocessors
    stream = sheet.bytes_per_second * facts.stream_fraction
    share = sustained_fraction(
        sheet.power_watts, sheet.half_flops_per_second, facts.joules_per_flop
    )
    return Throughput(
        peak_flops_per_second=sheet.peak_flops_per_second,
        sustained_flops_per_second=sheet.peak_flops_per_second * share,
        sheet_bytes_per_second=sheet.bytes_per_second,
        stream_bytes_per_second=stream,
        cache_bytes=sheet.cache_bytes or facts.cache_bytes,
        exponentials_per_second=units * facts.exponentials_per_second,
        launch_seconds=sheet.launch_seconds,
        multiprocessors=units,
        tiles=_tiles(gemm, peak=sheet.peak_flops_per_second, units=units, stream=stream),
        wave_seconds=gemm.wave_seconds,
        store_exposed=gemm.store_exposed,
        alignment=constants.alignment,
        access=constants.access,
        architecture=facts,
        attention=constants.attention,
    )


def _tiles(gemm: GemmConstants, *, peak: float, units: int, stream: float) -> tuple[Tile, ...]:
    """Return the tiles with their times.

    A tile of r × c reads r + c operand elements per r·c multiply-adds, so it runs at 1 ÷ (1 +
    h·(1/r + 1/c)) of the issue rate, h being `half_tile`. Evening out the last wave writes and
    reads fp32 partial tiles of one wave.
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
    """Return the share of the rate left when contiguous rows have this many elements.

    `contiguous` may be the bitwise or of several extents: its lowest set bit is the alignment of
    the worst of them.
    """
    reach = (contiguous & -contiguous) * element_bytes
    return next((share for size, share in alignment if reach >= size), alignment[-1][1])


def launch_bound_seconds(
    device_seconds: float, *, dispatched_ops: int, dispatch_seconds: float
) -> float:
    """Return the seconds of a region of many kernels that one CPU thread dispatches.

    max(Σ device, ops · dispatch): kernels queue up while the CPU runs ahead; when the CPU is slower
    the device waits for every op. Eager PyTorch takes 5 to 10 µs per op forward, and about the same
    again for its backward; a captured graph takes under 1 µs. Leaves out the time by which the
    first op of the region is late, and synchronising ops, which belong between two regions.
    """
    return max(device_seconds, dispatched_ops * dispatch_seconds)
