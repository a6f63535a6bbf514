"""Reads host.toml: what the host takes to dispatch an op, and whether it runs ahead meanwhile."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from autopar.planner.cluster.reading import figure
from autopar.planner.cluster.units import parse_seconds
from autopar.planner.costs.compute import launch_bound_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What dispatching one op takes; `runs_ahead` where the device works meanwhile."""

    forward_seconds: float
    backward_seconds: float
    runs_ahead: bool

    def forward_region_seconds(self, device_seconds: float, ops: int) -> float:
        """Return the seconds of some ops' forward."""
        return self._region_seconds(device_seconds, ops, self.forward_seconds)

    def backward_region_seconds(self, device_seconds: float, ops: int) -> float:
        """Return the seconds of some ops' backward."""
        return self._region_seconds(device_seconds, ops, self.backward_seconds)

    def _region_seconds(self, device_seconds: float, ops: int, each: float) -> float:
        if not self.runs_ahead:
            return device_seconds + ops * each
        return launch_bound_seconds(device_seconds, dispatched_ops=ops, dispatch_seconds=each)


@cache
def read_host(architecture: str) -> Host:
    """Return the host of a device of this architecture."""
    source = resources.files("autopar.planner.costs").joinpath("host.toml")
    kind = "cpu" if architecture.casefold() == "cpu" else "gpu"
    table = tomllib.loads(source.read_text(encoding="utf-8"))[kind]
    return Host(
        forward_seconds=figure(table, "forward", parse_seconds, where=kind),
        backward_seconds=figure(table, "backward", parse_seconds, where=kind),
        runs_ahead=kind == "gpu",
    )
