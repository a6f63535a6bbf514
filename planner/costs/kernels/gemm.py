"""Turns the shape of a matrix product into seconds."""

from autopar.planner.costs.kernels.compute import Throughput, aligned_share


def gemm_seconds(
    m: int,
    n: int,
    k: int,
    *,
    rates: Throughput,
    batch: int = 1,
    element_bytes: float = 2,
    stored_bytes: float = 2,
    contiguous: int | None = None,
) -> float:
    """Return the seconds of `batch` products of m × k by k × n.

    tiles    = batch · ⌈m/r⌉ · ⌈n/c⌉                for the best of a few tile shapes r × c
    w, t     = tiles ÷ multiprocessors, k · seconds of a tile per depth
    clock    = ⌈w⌉ · seconds of a wave + min(⌈w⌉·t, w·t + evening out)
    power    = 2·batch·m·n·k ÷ sustained rate
    traffic  = bytes of operands and result ÷ streaming bandwidth
    seconds  = launch + max(clock ÷ alignment, power, traffic) + exposed share · result's traffic

    `stored_bytes` is traffic per element of the result: 2 to write bf16, 8 to read and write an
    fp32 gradient. `contiguous` is the bitwise or of the extents that are contiguous in memory;
    without it k and n, as in a linear's forward. Source: wave quantisation as in NVIDIA's matrix
    multiplication guide, stream-K (Osama 2023), constants fitted on SimuMax's tables of A100-PCIe
    and B200. Time never falls when m, n or k grow, alignment being equal. Leaves out: the library's
    wrong choices (most of what is left on A100), and that a cold device beats its power limit for
    some hundred microseconds (most of what is left on B200).
    """
    units = rates.multiprocessors
    wave_seconds = rates.wave_seconds
    clock = float("inf")
    for rows, columns, seconds_per_depth, balance_seconds in rates.tiles:
        tiles = batch * -(-m // rows) * -(-n // columns)
        waves = -(-tiles // units)
        tile_seconds = seconds_per_depth * k
        whole = waves * tile_seconds
        even = tiles / units * tile_seconds + balance_seconds
        seconds = waves * wave_seconds + (whole if whole < even else even)
        if seconds < clock:
            clock = seconds
    extents = k | n if contiguous is None else contiguous
    if extents * element_bytes % 16:
        clock /= aligned_share(extents, element_bytes, rates.alignment)
    power = 2.0 * batch * m * n * k / rates.sustained_flops_per_second
    stored = batch * m * n * stored_bytes / rates.stream_bytes_per_second
    traffic = batch * (m + n) * k * element_bytes / rates.stream_bytes_per_second + stored
    return rates.launch_seconds + max(clock, power, traffic) + rates.store_exposed * stored
