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
GLOBAL_BATCH = Annotated[
    str | None,
    typer.Option("--global-batch", metavar="ROWS", help="Rows of one step, all devices together."),
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
        help="Fix pp, dp, tp, shard, microbatch, stages_per_rank, zero or schedule.",
    ),
]
MAX_TP = Annotated[str | None, typer.Option("--max-tp", metavar="N", help="Most tensor ranks.")]
MAX_PP = Annotated[str | None, typer.Option("--max-pp", metavar="N", help="Most pipeline ranks.")]
MAX_DP = Annotated[str | None, typer.Option("--max-dp", metavar="N", help="Most data ranks.")]
MEMORY = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help='Memory to use of each device: "70 GiB", "95%"; 86% by default.',
    ),
]
OBJECTIVE = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="WHAT",
        help="Minimise step-time (the default), memory, or cost (also among --gpus 1,2).",
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
    typer.Option("--deadline", metavar="TIME", help="Time for the whole training: 24h, 3d."),
]
BUDGET = Annotated[
    str | None,
    typer.Option("--budget", metavar="USD", help="Cost of the whole training: 500, 2k."),
]
TOLERANCE = Annotated[
    str | None,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        help='Take the simplest plan within "3%" (the default) of the fastest; 0: the fastest.',
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
    seconds("--time-limit", text="Stop the search then, with the best plan found."),
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
