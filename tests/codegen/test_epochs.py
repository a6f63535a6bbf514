"""Epochs, their last rows and unequal shares of rows train as a plain loop does."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.codegen.emit import write_script
from autopar.codegen.proof.script_rank import imported
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from autopar.runtime.weights.plain_model import plain_model
from tests.cells import cells
from tests.codegen import counted_rows
from tests.codegen.plans import pinned_plan, plan_for
from tests.runtime.processes import run_on_ranks

WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "one": {"microbatch": 4},
        "dp2": {"degrees": (1, 2, 1), "microbatch": 2, "zero_levels": (Zero.OPTIMIZER,)},
        "dp2 zero3": {"degrees": (1, 2, 1), "microbatch": 2, "zero_levels": (Zero.PARAMETERS,)},
        "dp2 whole": {"degrees": (1, 2, 1)},
        "dp3": {"degrees": (1, 3, 1), "microbatch": 1},
        "tp2": {"degrees": (1, 1, 2), "microbatch": 4, "split": ("ffn",)},
        "pp2": {"degrees": (2, 1, 1), "microbatch": 2},
        "pp2 v": {"degrees": (2, 1, 1), "microbatch": 2,
                  "schedules": (ScheduleKind.ZERO_BUBBLE_V,)},
        "halves": {"degrees": (2, 2, 1), "microbatch": 1},
        "uneven": {"degrees": (1, 3, 1)},
        "uneven zero2": {"degrees": (1, 3, 1), "zero_levels": (Zero.GRADIENTS,)},
        "uneven tp2": {"degrees": (1, 3, 2), "split": ("ffn",)},
        "uneven pp2": {"degrees": (2, 3, 1), "microbatch": 2},
        "pp2 dp2": {"degrees": (2, 2, 1), "microbatch": 2},
        "pp2 tp2": {"degrees": (2, 1, 2), "microbatch": 4, "split": ("ffn", "seq")},
    }
)  # fmt: skip


@cache
def traced(kind: str, rows: int) -> tuple[ModelFile, Graph]:
    file = load_model_file(str(Path(counted_rows.__file__)), (f"kind={kind}", f"rows={rows}"))
    return file, trace(file)


@cache
def planned(kind: str, rows: int, way: str, global_batch: int) -> Plan:
    file, graph = traced(kind, rows)
    pins: dict[str, Any] = {"degrees": (1, 1, 1), "global_batch": global_batch, **WAYS[way]}
    return plan_for(file, graph, (f"kind={kind}", f"rows={rows}"), **pins)


def run(path: str, arguments: Sequence[str]) -> list[float]:
    script: Any = imported(Path(path))
    losses: list[float] = script.main(arguments)[1]
    return losses


def trained(plan: Plan, folder: Path, *arguments: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train by the script of a plan; return the loss of each step, and the weights."""
    script, weights = write_script(plan, folder, force=True), folder / "trained.safetensors"
    own = ["--dtype", "float64", "--log-every", "1", "--export", str(weights), *arguments]
    losses = run_on_ranks(run, plan.arrangement.ranks, str(script), own)[0]
    return losses, load_file(weights)


def order(epoch: int, rows: int) -> list[int]:
    """Return the order that the docs tell."""
    digest = hashlib.blake2b(f"0/{epoch}".encode(), digest_size=8).digest()
    numbers = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(rows, generator=numbers).tolist()


def batches(last: str, rows: int, size: int) -> Iterator[tuple[Fraction, list[int]]]:
    """Yield the rows of one step after another, and how many epochs have passed by then."""
    if last == "run-on":
        sequence = [row for epoch in range(9) for row in order(epoch, rows)]
        for end in range(size, len(sequence) + 1, size):
            yield Fraction(end, rows), sequence[end - size : end]
    for epoch in range(9):
        own: Any = order(epoch, rows)
        loader: DataLoader[Any] = DataLoader(own, size, drop_last=last == "drop")
        for number, batch in enumerate(loader, start=1):
            yield epoch + min(Fraction(number * size, rows), Fraction(1)), batch.tolist()


def train_plainly(
    kind: str, rows: int, steps: Sequence[Sequence[int]]
) -> tuple[list[float], Mapping[str, Tensor]]:
    """Train on one device, on the whole batch of each step."""
    model = plain_model(partial(counted_rows.build_model, kind), seed=0).double()
    optimizer = counted_rows.build_optimizer(model.parameters())
    dataset, losses = counted_rows.Listed(kind, rows), []
    for chosen in steps:
        made = [dataset[number] for number in chosen]
        batch = {key: torch.stack([row[key] for row in made]) for key in made[0]}
        given = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        loss = counted_rows.loss(model(given["x"]), given, kind)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: one.detach() for name, one in model.state_dict().items()}


def steps_of(last: str, epochs: str, rows: int, size: int) -> list[list[int]]:
    """Return the rows of each step until so many epochs have passed."""
    found = []
    for passed, batch in batches(last, rows, size):
        found.append(batch)
        ends = last == "drop" and passed % 1 + Fraction(size, rows) > 1
        if passed >= Fraction(ceil(Fraction(epochs) * rows), rows) or (
            ends and ceil(passed) >= Fraction(epochs)
        ):
            return found
    raise AssertionError


def compare(
    found: tuple[list[float], Mapping[str, Tensor]],
    expected: tuple[list[float], Mapping[str, Tensor]],
) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-9)
    names = {name for name in expected[1] if not name.endswith("num_batches_tracked")}
    assert names <= found[1].keys()
    for name in names:
        torch.testing.assert_close(found[1][name], expected[1][name], atol=1e-9, rtol=0, msg=name)


# The loss, the rows of an epoch, how they are laid out, the rows of a step, the last rows, epochs.
CELLS = [
    ("mean", 11, "one", 4, "pad", "2"),
    ("mean", 11, "dp2", 8, "pad", "2"),  # three rows for four microbatches: one has none
    ("mean", 13, "dp2 zero3", 8, "pad", "1.5"),
    ("targets", 11, "dp2", 8, "pad", "2"),
    ("targets", 11, "dp3", 6, "pad", "1.7"),
    ("two", 11, "dp2", 8, "pad", "2"),
    ("two", 11, "pp2", 8, "pad", "1"),
    ("sum", 11, "dp2", 8, "pad", "2"),
    ("sum", 11, "pp2", 8, "pad", "1"),
    ("norm", 11, "dp2 whole", 8, "pad", "2"),  # statistics are those of all rows
    ("mean", 11, "tp2", 8, "pad", "2"),
    ("targets", 11, "tp2", 8, "pad", "2"),
    ("mean", 11, "pp2", 8, "pad", "2"),
    ("targets", 11, "pp2 v", 8, "pad", "2"),
    ("targets", 11, "pp2 dp2", 8, "pad", "2"),
    ("targets", 11, "pp2 tp2", 8, "pad", "2"),
    ("mean", 11, "dp2", 4, "drop", "2.5"),
    ("targets", 11, "dp3", 6, "drop", "2"),
    ("targets", 11, "tp2", 4, "drop", "1.5"),
    ("mean", 11, "pp2", 8, "drop", "3"),
    ("targets", 11, "dp2", 8, "run-on", "2.5"),
    ("mean", 11, "pp2", 4, "run-on", "0.5"),
]  # fmt: skip
UNEVEN = [
    ("mean", 20, "uneven", 10, "run-on", "2"),
    ("targets", 20, "uneven", 10, "run-on", "2"),
    ("targets", 23, "uneven zero2", 10, "pad", "1"),
    ("two", 20, "uneven", 10, "run-on", "2"),
    ("sum", 20, "uneven", 10, "drop", "2"),
    ("norm", 23, "uneven", 10, "pad", "1"),
    ("mean", 23, "uneven tp2", 10, "pad", "1"),
    ("targets", 23, "uneven pp2", 10, "pad", "1"),
    ("mean", 20, "uneven pp2", 10, "run-on", "2"),
]
FEW = [CELLS[4], CELLS[9], CELLS[11], CELLS[14], CELLS[16], CELLS[20]]


def test_epochs_go_on_under_another_plan(tmp_path: Path) -> None:
    """The first leg ends within an epoch, whose last rows are a step of the second."""
    steps = steps_of("pad", "2", 11, 4)
    expected = train_plainly("targets", 11, steps)
    kept = ("--checkpoint", str(tmp_path / "kept"), "--last-rows", "pad", "--epochs")
    first = trained(planned("targets", 11, "one", 4), tmp_path, *kept, "1.2")
    last = trained(planned("targets", 11, "halves", 4), tmp_path, *kept, "2")
    compare((first[0] + last[0], last[1]), expected)
    assert len(first[0]) == 4


def test_options_of_the_usual_optimizer_are_those_of_its_settings(tmp_path: Path) -> None:
    plan = pinned_plan("llama.py", ("layers=2",))  # it has no optimizer of its own
    options = ("--betas", "0.8", "0.9", "--weight-decay", "0.3", "--warmup-steps", "1")
    arguments = ["--steps", "20", "--log-every", "1", "--export", "none", "--lr", "0.01"]
    script = write_script(plan, tmp_path)
    (by_options,) = run_on_ranks(run, 1, str(script), [*arguments, *options])
    (as_usual,) = run_on_ranks(run, 1, str(script), arguments)
    text = script.read_text(encoding="utf-8")
    for name, value in (("BETAS", "(0.8, 0.9)"), ("WEIGHT_DECAY", "0.3"), ("WARMUP_STEPS", "1")):
        text = re.sub(rf"^{name} = .*?  #", f"{name} = {value}  #", text, flags=re.M)
    script.write_text(text, encoding="utf-8")
    (by_settings,) = run_on_ranks(run, 1, str(script), arguments)
    assert by_options == by_settings != as_usual


def test_code_for_the_planned_rows_alone_says_so(tmp_path: Path) -> None:
    whole = write_script(planned("norm", 11, "dp2 whole", 8), tmp_path, force=True).read_text()
    assert "may_repeat=False" in whole  # a row that counts 0 would be in the statistics
    free = write_script(planned("targets", 11, "pp2 tp2", 8), tmp_path, force=True).read_text()
    assert "may_repeat=" not in free
    assert "fewest=" not in free
    assert "Crossing((ROWS, " in free


def test_ten_rows_are_shared_by_three_data_ranks() -> None:
    assert planned("mean", 20, "uneven", 10).arrangement.rows == (4, 3, 3)
    assert planned("mean", 20, "uneven pp2", 10).arrangement.rows == (2, 2, 1)


@pytest.mark.parametrize(
    ("kind", "rows", "way", "size", "last", "epochs"),
    cells([*CELLS, *UNEVEN], [*FEW, UNEVEN[0], UNEVEN[7]]),
)
def test_epochs_train_as_in_a_plain_loop(
    kind: str, rows: int, way: str, size: int, last: str, epochs: str, tmp_path: Path
) -> None:
    expected = train_plainly(kind, rows, steps_of(last, epochs, rows, size))
    plan = planned(kind, rows, way, size)
    options = ("--epochs", epochs, "--last-rows", last)
    compare(trained(plan, tmp_path, *options), expected)
