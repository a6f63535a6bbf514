"""Says what the host takes to dispatch an op, as measured or as in host.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from autopar.planner.cluster.reading import figure
from autopar.planner.cluster.units import parse_seconds
from autopar.planner.costs.compute import launch_bound_seconds
from autopar.planner.costs.measurements import HostTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What dispatching one op takes; `runs_ahead` where the device works meanwhile.

    Selective recompute looks at every op of a layer, in the forward and when that runs again.
    """

    forward_seconds: float
    backward_seconds: float
    selective_seconds: float  # more for each op of such a layer; hidden where it runs ahead
    runs_ahead: bool
    is_measured: bool = False

    def forward_region_seconds(
        self, device_seconds: float, ops: int, *, is_selective: bool = False
    ) -> float:
        """Return the seconds of some ops' forward."""
        each = self.forward_seconds + (self.selective_seconds if is_selective else 0.0)
        return self._region_seconds(device_seconds, ops, each)

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
        selective_seconds=0.0
        if kind == "gpu"
        else figure(table, "selective", parse_seconds, where=kind),
        runs_ahead=kind == "gpu",
    )


def measured_host(times: HostTimes, architecture: str) -> Host:
    """Return the host of a device as a profile found it."""
    runs_ahead = architecture.casefold() != "cpu"
    return Host(
        forward_seconds=times.forward_seconds,
        backward_seconds=times.backward_seconds,
        selective_seconds=0.0 if runs_ahead else times.selective_seconds,
        runs_ahead=runs_ahead,
        is_measured=True,
    )
