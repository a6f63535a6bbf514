"""A dry run counts the memory and the messages of one rank of many."""

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from autopar.codegen.proof.dryrun.watching import CollectiveTotal, Report, recording
from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.pipeline.schedules import build_schedule
from autopar.runtime.pipeline.stage import Stage as PipelineStage
from autopar.runtime.ranks.mesh import start, stop
from autopar.runtime.recompute.running_again import Mode, recompute
from autopar.runtime.weights.initial_weights import record

WIDTH, LAYERS, ROWS = 64, 4, 256
LAYER = WIDTH * WIDTH * 4  # bytes of a weight in fp32
ACTIVATION = ROWS * WIDTH * 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class Stage(nn.Module):
    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.is_first, self.is_last = is_first, is_last

    def forward(self, *received: Tensor, x: Tensor) -> Tensor:
        x = x if self.is_first else received[0]
        for layer in self.layers:
            x = layer(x)
        return x.sum() if self.is_last else x


def dry_run_step(
    build: Callable[[], tuple[Sequence[nn.Module], Sequence[Optimizer]]], step: Callable[[], object]
) -> Report:
    """Run a step twice under fake tensors and report on the second, when optimizer states exist."""
    with recording() as record:
        modules, optimizers = build()
        step()
        with record.measured(modules, optimizers):
            step()
    return record.report()


def dry_run(rank: int, data: int, *, zero: int, mode: Mode = "none", half: bool = False) -> Report:
    with patch.dict(os.environ, AUTOPAR_DRYRUN=f"{rank}/{data}"):
        mesh = start(pipeline=1, data=data, tensor=1)
    with torch.device("meta"):
        model = Stage(is_first=True, is_last=True)
    for layer in model.layers:
        recompute(layer, mode)
    dtype = torch.bfloat16 if half else None
    wrap(model, mesh, zero=zero, bucket_bytes=LAYER, units=list(model.layers), compute_dtype=dtype)
    made: list[AdamW] = []

    def build() -> tuple[list[nn.Module], list[AdamW]]:
        model.to_empty(device="cpu")
        made.append(build_optimizer([model], AdamW, zero=zero, mesh=mesh))  # type: ignore[arg-type]
        return [model], made

    def step() -> None:
        made[0].zero_grad()
        model(x=torch.zeros(ROWS, WIDTH)).backward()
        made[0].step()

    report = dry_run_step(build, step)
    stop(mesh)
    return report


STATES = ("parameters", "optimizer", "gradients")


@pytest.mark.parametrize("frozen", [0, LAYERS - 1])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_training_in_16_bits_begins_within_what_its_states_take(zero: int, frozen: int) -> None:
    with patch.dict(os.environ, AUTOPAR_DRYRUN="0/8"):
        mesh = start(pipeline=1, data=8, tensor=1)
    with torch.device("meta"):
        model = Stage(is_first=True, is_last=True)
    model.layers[:frozen].requires_grad_(False)
    layers = list(model.layers)
    wrap(model, mesh, zero=zero, bucket_bytes=LAYER, units=layers, compute_dtype=torch.bfloat16)
    with recording() as record:
        with record.measured([model], []):
            model.to_empty(device="cpu")
            optimizer = build_optimizer([model], AdamW, zero=zero, mesh=mesh)
        beginning = record.report().peak_bytes
        with record.second_step([model], optimizer):
            model(x=torch.zeros(ROWS, WIDTH)).backward()
            optimizer.step()
    found = record.report().peak_bytes_by_category
    stop(mesh)
    assert beginning <= sum(found[one] for one in STATES)


def test_data_parallel_memory_is_what_a_person_adds_up() -> None:
    report = dry_run(3, 1024, zero=0)
    found = report.peak_bytes_by_category
    steps = LAYERS * 4  # one number per weight: how often AdamW has stepped it
    assert found["parameters"] == LAYERS * LAYER
    assert found["optimizer"] == 2 * LAYERS * LAYER + steps
    # At the peak, the start of the backward: input, and per layer the product (for sin) and the
    # sine (for the next product); of gradients all buckets stand from the step before.
    assert found["gradients"] == LAYERS * LAYER
    assert found["activations"] >= (1 + 2 * LAYERS - 1) * ACTIVATION
    assert report.peak_bytes == pytest.approx(sum(found.values()), rel=0.01)


@pytest.mark.parametrize(("zero", "gathers"), [(2, LAYERS), (3, 2 * LAYERS)])
def test_fully_sharded_parameters_are_gathered_as_often_as_the_level_says(
    zero: int, gathers: int
) -> None:
    report = dry_run(5, 8, zero=zero)
    assert report.peak_bytes_by_category["parameters"] == LAYERS * LAYER // 8
    counts = {call.kind: call.count for call in report.collectives}
    assert counts["reduce_scatter_base"] == LAYERS
    assert counts["allgather_base"] in (gathers, gathers - 1)  # the last one may be kept


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_whole_build_of_a_script_runs_under_fake_tensors(zero: int) -> None:
    """Recorded weights, wrapped after they are made, with copies of shards: 3 × 2 × tp 4."""
    with patch.dict(os.environ, AUTOPAR_DRYRUN="5/24"):
        mesh = start(pipeline=1, data=6, tensor=4, shard=2)
    models: list[nn.Module] = []
    optimizers: list[Optimizer] = []

    def build() -> tuple[list[nn.Module], list[Optimizer]]:
        model, recipe = record(lambda: Stage(is_first=True, is_last=True), seed=0)
        recipe.materialise(model, {}, mesh.tensor, mesh.device)
        models.append(wrap(model, mesh, zero=zero, units=list(next(model.children()).children())))
        optimizers.append(build_optimizer([model], AdamW, zero=zero, mesh=mesh))
        return models, optimizers

    def step() -> None:
        optimizers[0].zero_grad()
        models[0](x=torch.zeros(ROWS, WIDTH)).backward()
        optimizers[0].step()

    report = dry_run_step(build, step)
    shared = 2 if zero >= 2 else 1
    assert report.peak_bytes_by_category["parameters"] == LAYERS * LAYER // shared
    ranks = {call.kind: call.ranks for call in report.collectives}
    assert ranks["allreduce"] == (3 if zero else 6)
    assert all(ranks[kind] == 2 for kind in ranks if kind != "allreduce")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_model_that_was_sharded_on_meta_gets_its_memory(zero: int) -> None:
    """As scripts do it: recorded, wrapped, then made under fake tensors; one step tells all."""
    with patch.dict(os.environ, AUTOPAR_DRYRUN="1/4"):
        mesh = start(pipeline=1, data=4, tensor=1)
    model, recipe = record(lambda: Stage(is_first=True, is_last=True), seed=0)
    wrap(model, mesh, zero=zero, units=list(next(model.children()).children()))
    with recording() as watched:
        recipe.materialise(model, {}, mesh.tensor, mesh.device)
        optimizer = build_optimizer([model], AdamW, zero=zero, mesh=mesh)
        with watched.second_step([model], optimizer):
            model(x=torch.zeros(ROWS, WIDTH)).backward()
            optimizer.step()
    found = watched.report().peak_bytes_by_category
    stop(mesh)
    assert found["parameters"] == LAYERS * LAYER // (1 if zero == 1 else 4)
    steps = 4 * (LAYERS // 4 if zero == 1 else LAYERS)
    assert found["optimizer"] == 2 * LAYERS * LAYER // 4 + steps


def kept(function: Callable[[Tensor], Tensor]) -> int:
    """Return the bytes that live once a function of ACTIVATION bytes has run."""
    with recording() as watched:
        x = torch.zeros(ROWS, WIDTH, requires_grad=True)
        with watched.measured([], []):
            result = function(x)
            del result
    return watched.report().peak_bytes - ACTIVATION


def test_ops_keep_what_one_kernel_of_a_cuda_device_would() -> None:
    # The result, and beside it a figure per row, or a byte of mask per element.
    weight = torch.ones(WIDTH)
    assert kept(lambda x: F.rms_norm(x, (WIDTH,), weight)) == ACTIVATION + 4 * ROWS
    assert kept(lambda x: F.dropout(x, 0.1)) == ACTIVATION + ROWS * WIDTH
    assert kept(lambda x: torch.dropout(x, 0.1, train=True)) == ACTIVATION + ROWS * WIDTH

    def attention(*options: Any, **keywords: Any) -> int:
        return kept(
            lambda x: F.scaled_dot_product_attention(
                *(x.view(1, 1, ROWS, WIDTH),) * 3, *options, **keywords
            )
        )

    assert attention(dropout_p=0.1) == attention(None, 0.1, True) == attention()


def test_recomputation_keeps_the_inputs_of_layers_alone() -> None:
    kept = dry_run(0, 1, zero=0).peak_bytes
    recomputed = dry_run(0, 1, zero=0, mode="full").peak_bytes
    assert kept - recomputed >= (LAYERS - 2) * ACTIVATION


def test_a_stage_runs_its_schedule_without_its_neighbours() -> None:
    """1F1B, second of 4 stages, 8 microbatches: 3 in flight."""
    with patch.dict(os.environ, AUTOPAR_DRYRUN="1/4"):
        mesh = start(pipeline=4, data=1, tensor=1)
    with torch.device("meta"):
        model = Stage(is_first=False, is_last=False)
    crossing = [torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)]
    stage = PipelineStage(model, mesh, index=1, stages=4, receives=crossing, sends=crossing)
    schedule = build_schedule("1f1b", [stage], 8)
    optimizers: list[SGD] = []

    def build() -> tuple[list[nn.Module], list[SGD]]:
        model.to_empty(device="cpu")
        optimizers.append(SGD(model.parameters(), lr=0.1))
        return [model], optimizers

    def step() -> None:
        optimizers[0].zero_grad()
        schedule.step([{"x": torch.zeros(1)}] * 8, [1 / 8] * 8)
        optimizers[0].step()

    report = dry_run_step(build, step)
    message = {"ranks": 4, "bytes": ACTIVATION, "count": 16}
    assert report.collectives == (
        CollectiveTotal(kind="recv", **message),
        CollectiveTotal(kind="send", **message),
    )
    per_microbatch = 2 * LAYERS * ACTIVATION + ACTIVATION  # what is kept, and the output
    in_flight = report.peak_bytes_by_category["activations"] / per_microbatch
    assert 2.5 < in_flight < 3.5


def test_a_split_backward_leaves_each_gradient_in_its_bucket_alone() -> None:
    with patch.dict(os.environ, AUTOPAR_DRYRUN="2/4"):
        mesh = start(pipeline=2, data=2, tensor=1)
    with torch.device("meta"):
        model = wrap(Stage(is_first=False, is_last=True), mesh, zero=0)
    received = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    stage = PipelineStage(model, mesh, index=1, stages=2, receives=[received], sends=[])
    schedule = build_schedule("interleaved-zero-bubble", [stage], 4)
    with recording() as watched:
        model.to_empty(device="cpu")
        optimizer = SGD(model.parameters(), lr=0.1)
        with watched.second_step([model], optimizer):
            schedule.step([{"x": torch.zeros(1)}] * 4, [1 / 4] * 4)
            optimizer.step()
    found = watched.report().peak_bytes_by_category
    stop(mesh)
    assert found["gradients"] == LAYERS * LAYER


def test_rows_that_are_read_ahead_lie_in_the_memory_of_the_host() -> None:
    with recording() as record:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = AdamW(model.parameters())
        ahead, rows = torch.zeros(100 * ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
        with record.second_step([model], optimizer, ({"x": rows}, 1.0)):
            model(rows).sum().backward()
    found = record.report().peak_bytes_by_category
    assert rows.nbytes <= found["activations"] < 3 * rows.nbytes < ahead.nbytes
