"""The options of `autopar plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.options import seconds
from autopar.planner.plan.declared.settings import (
    BY_KEYWORD,
    keys_of,
    option_of,
)

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
        metavar="KEY=VALUE,…",
        help=f"Use exactly these values: {', '.join(keys_of('pins'))}.",
    ),
]
CONSTRAINTS = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--constraints",
        metavar="FILE",
        help="A file of constraints: docs/constraints-file.md.",
    ),
]
TIME_LIMIT = Annotated[
    float | None,
    seconds("--time-limit", text="Stop the search after so long, with the best plan found."),
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
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


Command = Callable[..., None]


def with_demands(*, after: str) -> Callable[[Command], Command]:
    """Replace a command's `demands` by an option for each constraint, after the option `after`."""

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
    option = typer.Option(option_of(keyword), metavar=row.metavar, help=text)
    annotation = Annotated[str | None, option]
    return Parameter(keyword, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
