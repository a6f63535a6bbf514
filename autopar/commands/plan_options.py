"""The options of `autopar plan`, and the cluster and constraints that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autopar.number_options import seconds
from autopar.planner.cluster.choose import choose_cluster
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import read_cluster
from autopar.planner.errors import InputError

MODEL = Annotated[str, typer.Argument(metavar="MODEL", help="path.py or path.py:factory")]
ARG = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="KEY=VALUE",
        help="An argument for functions of the model file; several may be given.",
    ),
]
GPUS = Annotated[str | None, typer.Option("--gpus", metavar="N", help="Devices in all.")]
DEVICE = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Such as a100-80gb-sxm; else the GPUs here, or h100-sxm where there are none.",
    ),
]
NODES = Annotated[
    str | None, typer.Option("--nodes", metavar="N", help="Machines that the devices are in.")
]
CLUSTER = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="A file of machines: docs/cluster-file.md."),
]
GLOBAL_BATCH = Annotated[
    str | None,
    typer.Option("--global-batch", metavar="ROWS", help="Of one step, all devices together."),
]
PRECISION = Annotated[
    str | None, typer.Option("--precision", metavar="TYPE", help="bf16 (as usual), fp16 or fp32.")
]
PIN = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="KEY=VALUE,…",
        help="Exactly so: pp, dp, tp, shard, microbatch, stages_per_rank, zero, schedule.",
    ),
]
MAX_TP = Annotated[str | None, typer.Option("--max-tp", metavar="N", help="Most tensor ranks.")]
MAX_PP = Annotated[str | None, typer.Option("--max-pp", metavar="N", help="Most pipeline ranks.")]
MAX_DP = Annotated[str | None, typer.Option("--max-dp", metavar="N", help="Most data ranks.")]
MEMORY = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help='Of a device to use: "70 GiB" or "95%"; 84% as usual.'
    ),
]
OBJECTIVE = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="WHAT",
        help="Least step-time (as usual), memory, or cost: on given machines, that of least time.",
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
    seconds("--time-limit", text="Take the best plan found until then."),
]
PROFILE = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured times: docs/profile.md."),
]
OUTPUT = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", help="Where plan.json and train.py go.")
]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite a train.py changed by hand.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def cluster_of(
    gpus: str | None, device: str | None, nodes: str | None, file: Path | None
) -> Cluster:
    """Return the cluster that the options describe."""
    if file is None:
        if gpus is None:
            raise InputError(
                "no machines are given", fix="--gpus 8, or --cluster cluster.toml for unequal ones"
            )
        machines = None if nodes is None else _whole(nodes, "--nodes")
        return choose_cluster(_whole(gpus, "--gpus"), device, machines)
    given = _named(("--gpus", gpus), ("--device", device), ("--nodes", nodes))
    if given:
        raise InputError(
            f"{', '.join(given)} and --cluster both say what the machines are",
            fix="leave one of them out",
        )
    return read_cluster(file)


def _whole(text: str, option: str) -> int:
    """Return the whole number that an option says; which numbers make sense is checked later."""
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{text!r} is not a number of devices",
            where=option,
            expected="a whole number",
            fix="--gpus says how many devices, --nodes how many machines, --device which",
        ) from None


def _named(*options: tuple[str, object]) -> Sequence[str]:
    return [name for name, value in options if value is not None]
