"""Turns figures as people write them ("80 GiB", "25 us", "400 Gb/s") into numbers, and back."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from autopar.planner.errors import InputError

DECIMAL = ("", "K", "M", "G", "T", "P")
BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi")


def _byte_units() -> dict[str, float]:
    decimal = {f"{prefix}B": 1000.0**power for power, prefix in enumerate(DECIMAL)}
    binary = {f"{prefix}B": 1024.0 ** (power + 1) for power, prefix in enumerate(BINARY)}
    return decimal | binary


def _bandwidth_units() -> dict[str, float]:
    bytes_per_second = {f"{unit}/s": size for unit, size in _byte_units().items()}
    bits_per_second = {f"{prefix}b/s": 1000.0**power / 8 for power, prefix in enumerate(DECIMAL)}
    bit_names = {f"{prefix}bps": 1000.0**power / 8 for power, prefix in enumerate(DECIMAL)}
    return bytes_per_second | bits_per_second | bit_names


BYTES: Mapping[str, float] = MappingProxyType(_byte_units())
BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType(_bandwidth_units())
SECONDS: Mapping[str, float] = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
)
FLOPS_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {
        f"{prefix}{name}": 1000.0**power
        for power, prefix in enumerate(DECIMAL)
        for name in ("FLOP/s", "FLOPS")
    }
)
_LEAST, _MOST = 1e-15, 1e18  # FLOP/s and bytes; no latency is shorter
WATTS: Mapping[str, float] = MappingProxyType({"W": 1.0, "kW": 1000.0})

FIGURE = re.compile(
    r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf|nan)\s*(\S*)\s*", re.IGNORECASE
)


def parse_bytes(value: object, *, where: str) -> int:
    """Return the bytes of a size such as "80 GiB"."""
    return max(1, round(_parse(value, BYTES, where=where, example="80 GiB")))


def parse_seconds(value: object, *, where: str) -> float:
    """Return the seconds of a time such as "25 us"."""
    return _parse(value, SECONDS, where=where, example="25 us")


def parse_bytes_per_second(value: object, *, where: str) -> float:
    """Return the bytes per second of a bandwidth such as "450 GB/s" or "400 Gb/s" (bits)."""
    return _parse(value, BYTES_PER_SECOND, where=where, example="450 GB/s")


def parse_flops_per_second(value: object, *, where: str) -> float:
    """Return the FLOPs per second of a rate such as "312 TFLOP/s"."""
    return _parse(value, FLOPS_PER_SECOND, where=where, example="312 TFLOP/s")


def parse_watts(value: object, *, where: str) -> float:
    """Return the watts of a power such as "700 W"."""
    return _parse(value, WATTS, where=where, example="700 W")


def _parse(value: object, units: Mapping[str, float], *, where: str, example: str) -> float:
    fix = f'write a number and its unit, for example "{example}"'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise InputError(f"{value} has no unit", where=where, fix=fix)
    match = FIGURE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{value!r} is not a figure with a unit", where=where, fix=fix)
    number, unit = float(match[1].replace("_", "")), match[2]
    if not unit:
        raise InputError(f"{value!r} has no unit", where=where, fix=fix)
    if unit not in units:
        known = ", ".join(units)
        meant = [one for one in units if one.casefold() in (unit.casefold(), f"{unit}b".casefold())]
        raise InputError(
            f"{value!r} has the unknown unit {unit!r}",
            where=where,
            expected=f"one of {known}",
            fix=f"did you mean {match[1]} {' or '.join(meant)}?" if meant else fix,
        )
    figure = number * units[unit]
    if not math.isfinite(figure) or figure <= 0:
        raise InputError(f"{value!r} is not a positive, finite figure", where=where, fix=fix)
    if not _LEAST <= figure <= _MOST:
        raise InputError(f"{value!r} is beyond all machines", where=where, fix="check the unit")
    return figure


def bytes_text(size_bytes: float) -> str:
    """Return a size as people read it: "79.6 GiB"."""
    power = min(int(math.log(max(size_bytes, 1), 1024)), len(BINARY))
    return f"{size_bytes / 1024**power:.4g} {BINARY[power - 1] if power else ''}B"


def seconds_text(seconds: float) -> str:
    """Return a time as people read it: "1.53 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def bandwidth_text(bytes_per_second: float) -> str:
    """Return a bandwidth as people read it: "450 GB/s"."""
    power = min(int(math.log(max(bytes_per_second, 1), 1000)), len(DECIMAL) - 1)
    return f"{bytes_per_second / 1000**power:.4g} {DECIMAL[power]}B/s"
