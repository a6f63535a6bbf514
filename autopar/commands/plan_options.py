"""The options of `autopar plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.options import seconds

MODEL = Annotated[str, typer.Argument(metavar="MODEL", help="path.py or path.py:factory")]
ARG = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="KEY=VALUE",
        help="An argument for functions of the model file; several may be given.",
    ),
]
GPUS = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="N", help="Devices in all; several to compare: 1,2,4,8 or 1..64."
    ),
]
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
    str | None,
    typer.Option("--precision", metavar="TYPE", help="bf16 (the default), fp16 or fp32."),
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
        "--memory", metavar="SIZE", help='Of a device to use: "70 GiB" or "95%"; 86% by default.'
    ),
]
OBJECTIVE = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="WHAT",
        help="Least step-time (the default), memory, or cost, which also chooses among --gpus 1,2.",
    ),
]
SAMPLES = Annotated[
    str | None, typer.Option("--samples", metavar="N", help="Rows of the whole training: 500M.")
]
TOKENS = Annotated[
    str | None, typer.Option("--tokens", metavar="N", help="Tokens of the whole training: 10B.")
]
DEADLINE = Annotated[
    str | None,
    typer.Option("--deadline", metavar="TIME", help="Of the whole training: 24h, 3d."),
]
BUDGET = Annotated[
    str | None,
    typer.Option("--budget", metavar="USD", help="Of the whole training: 500, 2k."),
]
TOLERANCE = Annotated[
    str | None,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        help='The simplest plan within so much of the fastest: "3%" (the default), 0: the fastest.',
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
VERIFY = Annotated[
    bool | None,
    typer.Option("--verify/--no-verify", help="Verify it; by default what takes ten seconds."),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
