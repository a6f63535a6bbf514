"""What one device is: the facts of its data sheet."""

from dataclasses import dataclass

from autopar.planner.cluster.link import Link
from autopar.planner.errors import InputError
from autopar.planner.numbers import Degree, Figure, Rate, Seconds, SomeBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The data sheet of one device; peaks are dense."""

    name: str
    vendor: str
    architecture: str
    memory_bytes: SomeBytes
    memory_bytes_per_second: Rate
    peaks: tuple[tuple[str, Rate], ...]  # dtype, FLOPs per second
    link: Link  # to the other devices of its scale-up domain
    domain: Degree  # that one scale-up domain can hold; more than one node has: it spans nodes
    devices_per_node: Degree
    launch_seconds: Seconds
    fabric: str  # the network that such nodes usually have
    bridge: Link | None = None  # joins pairs, where a cluster file says that it is fitted
    devices_per_socket: Degree | None = None  # where traffic between sockets is slower
    power_watts: Rate | None = None
    multiprocessors: Degree | None = None
    cache_bytes: SomeBytes | None = None
    usd_per_hour: Figure | None = None
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether programs run on the host itself."""
        return self.architecture.casefold() == "cpu"

    def peak_flops_per_second(self, dtype: str) -> float:
        """Return the dense peak at a dtype."""
        peaks = dict(self.peaks)
        if dtype not in peaks:
            raise InputError(
                f"{self.name} has no {dtype} units",
                expected=f"one of {', '.join(peaks)}",
                fix="plan in one of these (--precision), or give the peak in a cluster file",
            )
        return peaks[dtype]
