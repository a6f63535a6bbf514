"""Reads efficiency.toml into the constants that the compute formulas use."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from autopar.planner.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConstants:
    """How matrix kernels of one kind of processor turn its peak into work."""

    issue_fraction: float
    half_tile: float
    wave_seconds: float
    store_exposed: float
    balance_traffic: float
    tiles: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConstants:
    """What fused attention kernels share on every device."""

    backward_flops: float
    wide_head_dim: int
    wide_forward: float
    wide_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConstants:
    """Bandwidth reached by kinds of memory access, relative to a streaming kernel."""

    cross_entropy: float
    gather: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Facts of one generation of hardware; efficiency.toml says what each one means."""

    joules_per_flop: float
    stream_fraction: float
    multiprocessors: int
    cache_bytes: int
    attention_forward: float
    attention_backward: float
    forward_tail_rows: float
    backward_tail_rows: float
    softmax_dims: float
    query_block: int
    exponentials_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConstants:
    """Everything that efficiency.toml holds."""

    gpu_gemm: GemmConstants
    cpu_gemm: GemmConstants
    attention: AttentionConstants
    access: AccessConstants
    alignment: tuple[tuple[int, float], ...]
    architectures: Mapping[str, Architecture]

    def gemm(self, architecture: str) -> GemmConstants:
        """Return the matrix constants of a generation."""
        return self.cpu_gemm if architecture == "cpu" else self.gpu_gemm

    def architecture(self, name: str) -> Architecture:
        """Return the facts of a generation; "Blackwell Ultra" is found under "blackwell"."""
        for known in sorted(self.architectures, key=len, reverse=True):
            if name.casefold().startswith(known):
                return self.architectures[known]
        raise unknown_architecture(name, tuple(self.architectures))


def unknown_architecture(name: str, known: tuple[str, ...]) -> InputError:
    """Return the error for a generation that efficiency.toml does not hold."""
    near = difflib.get_close_matches(name.casefold(), known, n=1)
    return InputError(
        f"the device architecture {name!r} is not known",
        expected=f"one of {', '.join(known)}",
        fix=f"did you mean {near[0]!r}?" if near else "name the nearest generation",
    )


@cache
def read_compute_constants() -> ComputeConstants:
    """Return the constants that are shipped with autopar."""
    source = resources.files("autopar.planner.costs.kernels").joinpath("efficiency.toml")
    table = tomllib.loads(source.read_text(encoding="utf-8"))
    gemm = {
        kind: GemmConstants(**{**row, "tiles": tuple((r, c) for r, c in row["tiles"])})
        for kind, row in table["gemm"].items()
    }
    return ComputeConstants(
        gpu_gemm=gemm["gpu"],
        cpu_gemm=gemm["cpu"],
        attention=AttentionConstants(**table["attention"]),
        access=AccessConstants(**table["access"]),
        alignment=tuple((int(size), share) for size, share in table["alignment"].items()),
        architectures=MappingProxyType(
            {name: Architecture(**row) for name, row in table["architecture"].items()}
        ),
    )
