"""Compares step times and losses with and without local steps and compressed gradients.

    python -m benchmarks.slow_networks [--table NAME] [--steps 300] [-o FILE]

The first table has predicted steps of 16 A100s on two nodes with one network card each; the second
those of BERT-large on 1 to 64 A100s, over 10 Gb/s. The others have the losses of models of the zoo
in fp32, the mean of the last 50 steps. One process plays the four replicas, as in `autopar verify`,
which shows that scripts train like this.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from autopar.api import plan
from autopar.codegen.proof.plain import (
    Task,
    batches_of,
    build_alone,
    loss_of,
    optimizer_of,
    scheduler_of,
    task_of,
)
from autopar.codegen.proof.replicas import PlayedOuter, shared_out
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.telling.words import degrees_words, local_words
from autopar.planner.precision import Allowed
from autopar.planning import traced_plan

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "slow_networks.md"
RATES = (1, 10, 25, 100)  # Gb/s
CLUSTER = """
[[nodes]]
count = {nodes}
device = "a100-80gb-sxm"
devices = 8

[network]
bandwidth = "{rate} Gb/s"
cards_per_node = 1
latency = "30 us"
topology = "switch"
efficiency = 0.9
"""
MODELS: Mapping[str, tuple[str, dict[str, object], int]] = {
    "BERT-large": ("bert.py", {"size": "large"}, 128),
    "GPT-2 124M": ("gpt2.py", {"size": "124m"}, 128),
    "ResNet-50": ("resnet.py", {"size": "50"}, 1024),
}
FASTEST = "fastest in every step"  # of all kinds of plans; the other columns have 16 data ranks
CHOICES: Mapping[str, dict[str, Any]] = {
    FASTEST: {},
    "every step": {},
    "16 local steps": {"sync_every": 16},
    "64 local steps": {"sync_every": 64},
    "256 local steps": {"sync_every": 256},
}
GPUS, ROWS, CURVE_RATE = (1, 2, 4, 8, 16, 32, 64), 256, 10  # of the curve; the rate in Gb/s
# the curve's columns: what the search may choose
ALLOWED: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    **{one.value: {"allow": one.value} for one in Allowed},
}
ZOO: Mapping[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2.py", {"dropout": 0.0}),
    "mnist": ("mnist.py", {}),
    "resnet": ("resnet.py", {}),
}
LEARNT: Mapping[str, dict[str, Any]] = {
    "every step": {},
    "10 local steps, averaged": {"sync_every": 10, "outer": "average"},
    "10 local steps, Nesterov": {"sync_every": 10},
    "50 local steps, averaged": {"sync_every": 50, "outer": "average"},
    "50 local steps, Nesterov": {"sync_every": 50},
}
# outer steps in parts; `delay` is how many local steps the sending of a part lasts
STREAMED: Mapping[str, dict[str, Any]] = {
    "every step": {},
    "50 local steps": {"sync_every": 50},
    "5 parts, sent during 1 step": {"sync_every": 50, "outer_parts": 5, "delay": 1},
    "during 5 steps": {"sync_every": 50, "outer_parts": 5, "delay": 5},
    "during 9 steps": {"sync_every": 50, "outer_parts": 5, "delay": 9},
}
LAST = 50  # steps whose losses count


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row of a table."""

    name: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {self.name} | {' | '.join(self.cells)} |"


def head(name: str, columns: Mapping[str, object]) -> str:
    """Return the first two lines of a table."""
    return f"{Line(name=name, cells=tuple(columns))}\n|---|{'---|' * len(columns)}"


def predicted() -> Iterator[Line]:
    """Yield a row for each model and network."""
    with TemporaryDirectory() as folder:
        for name, (file, arguments, rows) in MODELS.items():
            for rate in RATES:
                cluster = Path(folder) / f"{rate}.toml"
                cluster.write_text(CLUSTER.format(rate=rate, nodes=2), encoding="utf-8")
                plans = {
                    column: plan(
                        ROOT / "models_zoo" / file,
                        arguments=arguments,
                        cluster=cluster,
                        global_batch=rows,
                        pins={} if column == FASTEST else {"dp": 16},
                        compile="none",
                        tolerance=0,
                        **choice,
                    )
                    for column, choice in CHOICES.items()
                }
                degrees = f" ({degrees_words(plans[FASTEST].arrangement)})"
                cells = tuple(
                    f"{one.step_seconds * 1e3:,.0f} ms{degrees * (column == FASTEST)}"
                    for column, one in plans.items()
                )
                yield Line(name=f"{name}, {rate} Gb/s", cells=cells)


def curve() -> Iterator[Line]:
    """Yield a row for each number of devices; the knee of each column is bold."""
    file, arguments, _ = MODELS["BERT-large"]
    with TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        text = CLUSTER.format(rate=CURVE_RATE, nodes=GPUS[-1] // 8)
        cluster.write_text(text, encoding="utf-8")
        columns = []
        for allowed in ALLOWED.values():
            made = plan(
                ROOT / "models_zoo" / file,
                arguments=arguments,
                cluster=cluster,
                gpus=GPUS,
                global_batch=ROWS,
                compile="none",
                **allowed,
            )
            assert made.curve is not None
            columns.append(made.curve)
    for number, devices in enumerate(GPUS):
        cells = []
        for column in columns:
            point = column.points[number]
            own = point.plan.arrangement
            sent = own.compression.words or local_words(own)
            words = ", ".join(filter(None, (degrees_words(own), sent)))
            cell = f"{point.step_seconds * 1e3:,.0f} ms ({words})"
            cells.append(f"**{cell}**" if point is column.knee else cell)
        yield Line(name=str(devices), cells=tuple(cells))


def learnt(choices: Mapping[str, dict[str, Any]], steps: int) -> Iterator[Line]:
    """Yield a row for each model of the zoo."""
    for name, (file, arguments) in ZOO.items():
        cells = [f"{loss(file, arguments, one, steps):.4f}" for one in choices.values()]
        yield Line(name=name, cells=tuple(cells))


def loss(file: str, arguments: dict[str, object], choice: dict[str, Any], steps: int) -> float:
    """Return the mean loss of the last steps of a training, as `autopar verify` plays it."""
    delay, choice = choice.get("delay", 0), {k: v for k, v in choice.items() if k != "delay"}
    made = plan(
        ROOT / "models_zoo" / file,
        gpus=4,
        device="cpu",
        arguments=arguments,
        global_batch=32,
        precision="fp32",
        pins={"dp": 4, "zero": 0, **({"shard": 1} if choice else {})},
        **choice,
    ).content
    traced = traced_plan(made, ROOT)
    task = task_of(traced, made.model.spec, steps=steps, dtype="float32")
    model_file = load_model_file(task.spec, task.arguments)
    replicas = [Replica(model_file, task) for _ in (task.local.rows if task.local else [()])]
    outer, losses = None, []
    if task.local is not None:
        local = replace(task.local, every=made.arrangement.sync_every, delay=delay)
        outer = PlayedOuter([one.model for one in replicas], local)
    for step, batch in enumerate(islice(batches_of(model_file, task), steps), start=1):
        parts = [(batch, 1.0)] if task.local is None else shared_out(batch, task.local)
        pairs = zip(replicas, parts, strict=True)
        losses.append(sum(one.learn(*part) for one, part in pairs) / len(replicas))
        if outer is not None:
            outer.step_parts(step)
    return sum(losses[-LAST:]) / LAST


class Replica:
    """A model and its optimizer, which train on all rows or on those of a replica."""

    def __init__(self, file: ModelFile, task: Task) -> None:
        self.file, self.task, self.model = file, task, build_alone(file, task)
        self.optimizer = optimizer_of(file, self.model, task)
        self.scheduler = scheduler_of(file, self.optimizer, task, steps=task.steps)

    def learn(self, batch: dict[str, Tensor], weight: float) -> float:
        """Take a step, and return the weighted loss."""
        loss = loss_of(self.model, self.file, batch, self.task) * weight
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.item()


def main() -> None:
    """Write all tables, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--table", choices=("predicted", "curve", "learnt", "streamed"))
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    after = f"loss after {options.steps} steps"
    tables = {
        "predicted": ("model and network", CHOICES, predicted),
        "curve": ("devices", ALLOWED, curve),
        "learnt": (after, LEARNT, lambda: learnt(LEARNT, options.steps)),
        "streamed": (after, STREAMED, lambda: learnt(STREAMED, options.steps)),
    }
    text = []
    for table, (name, columns, rows) in tables.items():
        if options.table not in (table, None):
            continue
        text.append(head(name, columns))
        for row in rows():
            text.append(str(row))
            sys.stderr.write(f"{row}\n")
        text.append("")
    options.output.write_text("# Slow networks\n\n" + "\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
