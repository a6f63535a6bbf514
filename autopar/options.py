"""Defines the options that commands share, and those of `autopar plan`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from inspect import Parameter, signature
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import (
    check_count,
    choose_cluster,
    filling_counts,
    first_devices,
    prefix_sizes,
    read_cluster,
)
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.settings import (
    BY_KEYWORD,
    keys_of,
    option_of,
)

if TYPE_CHECKING:
    from autopar.planning import Request

MOST = 2**31  # the largest integer that an option accepts
_MOST_SECONDS = 1e9
Number = TypeVar("Number", int, float)


TOLERANCE = 1e-9  # of a verification: in float64, after several steps of AdamW
MANY_FLOPS = 2e12  # of a step: its verification takes minutes on CPUs

CACHE = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Reuse what was found before, if nothing has changed."),
]


def whole(name: str, *, least: int, most: int = MOST, metavar: str = "N", text: str) -> Any:
    """Return an integer option; `text` is its help."""
    expected = f"a whole number of at least {least}" + (f", at most {most}" if most < MOST else "")
    read = _reader(name, int, lambda n: least <= n <= most, expected=expected)
    return typer.Option(name, parser=read, metavar=metavar, help=text)


def seconds(name: str, *, text: str) -> Any:
    """Return an option for a time."""
    expected = "seconds, above 0, such as 60"
    read = _reader(name, float, lambda n: 0 < n <= _MOST_SECONDS, expected=expected)
    return typer.Option(name, parser=read, metavar="SECONDS", help=text)


def difference(name: str, *, text: str) -> Any:
    """Return an option for the largest difference to accept."""
    expected = "a number from 0 on, such as 1e-9"
    read = _reader(name, float, lambda n: 0 <= n < inf, expected=expected)
    return typer.Option(name, parser=read, metavar="X", help=text)


def _reader(
    name: str,
    kind: type[Number],
    is_in_range: Callable[[float], bool],
    *,
    expected: str,
) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        fault = "is not a whole number" if kind is int else "is not a number"
        with suppress(ValueError):
            number = kind(text)
            if is_in_range(number):
                return number
            fault = "is out of range"
        raise InputError(f"{text!r} {fault}", where=name, expected=expected)

    return read


_MOST_COUNTS = 64  # numbers of devices to plan for in one command
_EXPECTED = "a whole number, several such as 1,2,4,8, or a range such as 1..64"


def _clusters_of(
    gpus: str | None, *, device: str | None, nodes: str | None, file: Path | None
) -> tuple[Cluster, ...]:
    """Return the clusters that the options describe, the smallest first.

    With a cluster file, a number of devices means its first nodes, or a part of the first node.
    """
    if file is None and gpus is None:
        raise InputError(
            "no machines are given", fix="--gpus 8, or --cluster cluster.toml for unequal ones"
        )
    if file is None:
        machines = None if nodes is None else _integer(nodes, "--nodes")
        filling = filling_counts(device, machines)
        counts = _counts(gpus or "", filling)
        return tuple(choose_cluster(count, device, machines) for count in counts)
    given = [name for name, value in (("--device", device), ("--nodes", nodes)) if value]
    if given:
        raise InputError(
            f"{', '.join(given)} and --cluster both say what the machines are",
            fix="leave one of them out",
        )
    described = read_cluster(file)
    if gpus is None:
        return (described,)
    sizes = frozenset(prefix_sizes(described))
    return tuple(first_devices(described, count) for count in _counts(gpus, sizes.__contains__))


def _counts(text: str, is_filling: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the numbers of devices in a text such as "1,2,4..16", ascending.

    Of a range, only the numbers of devices that fill whole nodes are taken. Single numbers are
    checked later.
    """
    counts: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", part)
        if ends is None:
            counts.add(_integer(part, "--gpus"))
            continue
        first, last = int(ends[1]), int(ends[2])
        for end in (first, last):
            check_count(end, "--gpus")
        inside = [count for count in range(first, last + 1) if is_filling(count)]
        if not inside:
            raise InputError(
                f"no number of devices from {first} to {last} fills whole nodes",
                where="--gpus",
                expected="devices that fill whole nodes, or a part of a single node",
            )
        counts.update(inside)
    if len(counts) > _MOST_COUNTS:
        raise InputError(
            f"{len(counts)} numbers of devices to plan for",
            where="--gpus",
            expected=f"at most {_MOST_COUNTS}",
            fix="name those that matter: --gpus 8,16,32,64",
        )
    return tuple(sorted(counts))


def _integer(text: str, option: str) -> int:
    """Return the integer of an option; its range is checked later."""
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{text!r} is not a number of {'machines' if option == '--nodes' else 'devices'}",
            where=option,
            expected=_EXPECTED if option == "--gpus" else "a whole number",
            fix="--gpus says how many devices, --nodes how many machines, --device which",
        ) from None


# The headings in the help of `plan`; what is not listed stands under typer's own.
_LIMITS, _CHOICES, _WANTED = "What a plan may be", "Ways to train", "Which plan is the best"
_PANELS = {
    **dict.fromkeys(("max_tp", "max_pp", "max_dp", "memory", "host_memory"), _LIMITS),
    **dict.fromkeys(("compile", "float8", "offload"), _CHOICES),
    **dict.fromkeys(("sync_every", "outer", "outer_parts", "allow"), _CHOICES),
    **dict.fromkeys(("objective", "tolerance"), _WANTED),
    **dict.fromkeys(("samples", "tokens", "deadline", "budget"), _WANTED),
}

MODEL = Annotated[str, typer.Argument(metavar="MODEL", help="path.py or path.py:factory")]
ARG = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="KEY=VALUE",
        help="An argument for functions of the model file; may be repeated.",
    ),
]
GPUS = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="N", help="Number of devices; several are compared: 1,2,4,8 or 1..64."
    ),
]
DEVICE = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Such as a100-80gb-sxm. Default: the GPUs here, or h100-sxm without any.",
    ),
]
NODES = Annotated[
    str | None,
    typer.Option("--nodes", metavar="N", help="Number of machines that hold the devices."),
]
CLUSTER = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="A file of machines: docs/cluster-file.md."),
]
PIN = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        rich_help_panel=_LIMITS,
        metavar="KEY=VALUE,…",
        help=f"Use exactly these values: {', '.join(keys_of('pins'))}.",
    ),
]
CONSTRAINTS = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--constraints",
        rich_help_panel=_LIMITS,
        metavar="FILE",
        help="A file of constraints: docs/constraints-file.md.",
    ),
]
TIME_LIMIT = Annotated[
    float | None,
    seconds("--time-limit", text="Stop the search after this time, with the best plan so far."),
]
PROFILE = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured times: docs/profile.md."),
]
OUTPUT = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", help="Where plan.json and train.py go.")
]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite a train.py changed by hand.")]
VERIFY = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Verify the script; by default if it takes seconds."),
]
PLAN = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json or its folder")]
MOVED_MODEL = Annotated[
    str | None,
    typer.Option("--model", metavar="FILE", help="The plan's model file, if it has moved."),
]
OUTPUT_FILE = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")
]


Command = Callable[..., None]


def with_demands(*, after: str) -> Callable[[Command], Command]:
    """Return a decorator that replaces the parameter `demands` with one option per constraint.

    The options follow the parameter that `after` names.
    """

    def changed(command: Command) -> Command:
        given = signature(command, eval_str=True)
        parameters = [*_shown(given.parameters.values(), after)]

        @wraps(command)
        def run(**options: Any) -> None:
            demands = {keyword: options.pop(keyword) for keyword in BY_KEYWORD}
            command(demands=demands, **options)

        run.__annotations__ = {one.name: one.annotation for one in parameters}
        vars(run)["__signature__"] = given.replace(parameters=parameters)
        return run

    return changed


def _shown(own: Iterable[Parameter], after: str) -> Iterator[Parameter]:
    for one in own:
        if one.name != "demands":
            yield one
        if one.name == after:
            yield from map(_parameter, BY_KEYWORD)


def _parameter(keyword: str) -> Parameter:
    row = BY_KEYWORD[keyword]
    text = f"{row.text[0].upper()}{row.text[1:]}."
    panel = _PANELS.get(keyword)
    option = typer.Option(option_of(keyword), metavar=row.metavar, help=text, rich_help_panel=panel)
    annotation = Annotated[str | None, option]
    return Parameter(keyword, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def request_of(
    model: str,
    *,
    arguments: Sequence[str],
    gpus: str | None,
    device: str | None,
    nodes: str | None,
    cluster: Path | None,
    pins: Sequence[str],
    demands: Mapping[str, object],
    constraints: Path | None,
    time_limit_seconds: float | None,
    profile: Path | None,
    uses_cache: bool = True,
) -> Request:
    """Check options and return them as a request; `demands` are as in `DemandOptions`."""
    # not needed by --help and completion
    from autopar.notes import note_profile
    from autopar.planner.plan.declared.file import check_work, gathered_constraints
    from autopar.planner.profile.measured import read_measurements
    from autopar.planning import Request

    declared = gathered_constraints(pins, demands, constraints)
    check_work(declared)
    clusters = _clusters_of(gpus, device=device, nodes=nodes, file=cluster)
    measured = read_measurements(profile) if profile else None
    if measured is not None:
        note_profile(measured, clusters[-1], declared.precision)
        clusters = tuple(map(measured.on, clusters))
    return Request(
        model=model,
        arguments=tuple(arguments),
        clusters=clusters,
        constraints=declared,
        time_limit_seconds=time_limit_seconds,
        measured=measured,
        uses_cache=uses_cache,
    )
