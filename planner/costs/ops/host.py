"""Says what the host takes to dispatch an op, as measured or as in host.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from autopar.planner.cluster.reading import figure
from autopar.planner.cluster.units import parse_seconds
from autopar.planner.costs.kernels.compute import launch_bound_seconds
from autopar.planner.costs.ops.measurements import HostTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What dispatching one op takes; `runs_ahead` where the device works meanwhile."""

    forward_seconds: float
    backward_seconds: float
    runs_ahead: bool
    is_measured: bool = False

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
    source = resources.files("autopar.planner.costs.ops").joinpath("host.toml")
    kind = "cpu" if architecture.casefold() == "cpu" else "gpu"
    table = tomllib.loads(source.read_text(encoding="utf-8"))[kind]

    def seconds(name: str) -> float:
        return figure(table, name, parse_seconds, where=kind)

    return Host(
        forward_seconds=seconds("forward"),
        backward_seconds=seconds("backward"),
        runs_ahead=kind == "gpu",
    )


def measured_host(times: HostTimes, architecture: str) -> Host:
    """Return the host of a device as a profile found it."""
    return Host(
        forward_seconds=times.forward_seconds,
        backward_seconds=times.backward_seconds,
        runs_ahead=architecture.casefold() != "cpu",
        is_measured=True,
    )
