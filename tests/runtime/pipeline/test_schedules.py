"""Pipelines of every schedule, alone and around data parallelism, train as one process does."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import clip_by_global_norm
from autopar.runtime.pipeline.schedules import build_schedule, stage_indices
from autopar.runtime.pipeline.stage import Stage, Tie, TiedWeights
from autopar.runtime.ranks.mesh import Axis, Mesh, start
from autopar.runtime.recompute.running_again import Mode, recompute
from autopar.runtime.tensor.collectives import sum_gradients, sum_partials
from tests.cells import cells
from tests.runtime.processes import run_on_ranks
from tests.runtime.small_training import (
    BATCH,
    CLIP_NORM,
    SEQUENCE,
    STEPS,
    WIDTH,
    Part,
    build,
    largest_difference,
    loss_difference,
    microbatches,
    trained_alone,
    weight_decay_on_matrices,
    weights,
    whole,
)

MICROBATCHES = 8
PER_RANK = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "interleaved-zero-bubble": 2,
    "zero-bubble-v": 2,
}
SPLIT = ("interleaved-zero-bubble", "zero-bubble-v")
UNEVEN = (1 / 3, 0.0, 1 / 6, 1 / 2)  # weights that fp32 would round
Trained = tuple[list[float], dict[str, Tensor]]


def train(kind: str, pipeline: int, zero: int, frozen: bool, mode: Mode, tied: bool) -> Trained:
    """Train this rank's stages; return the losses and whole parameters."""
    mesh = start(pipeline=pipeline, data=dist.get_world_size() // pipeline, tensor=1)
    stages = pipeline * PER_RANK[kind]
    model = build(frozen=frozen, tied=tied)
    if tied:  # each stage has its own copy
        model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    parts = {
        index: Part(model, index, stages)
        for index in stage_indices(kind, mesh.pipeline.rank, pipeline, PER_RANK[kind])
    }
    crossing = _crossing(mesh, frozen=frozen, first_layer_only=stages == 8)
    made = []
    for index, part in parts.items():
        for layer in part.layers.values():
            recompute(layer, mode)
        wrap(
            part,
            mesh,
            zero=zero,
            bucket_bytes=4000,
            apart=[tie.names for tie in _ties(kind, pipeline)],
            units=list(part.layers.values()),
        )
        stage = Stage(
            part,
            mesh,
            index=index,
            stages=stages,
            receives=crossing(index - 1) if index else (),
            sends=crossing(index) if index < stages - 1 else (),
        )
        made.append(stage)
    schedule = build_schedule(kind, made, MICROBATCHES)
    ties = TiedWeights(mesh, list(parts.values()), _ties(kind, pipeline) if tied else ())
    held = list(parts.values())
    optimizer = build_optimizer(held, weight_decay_on_matrices, zero=zero, mesh=mesh)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = microbatches(step, MICROBATCHES, rank=mesh.data.rank, ranks=mesh.data.size)
        total = schedule.step(mine, weights(MICROBATCHES)).double()
        ties.sum_gradients()
        clip_by_global_norm(
            list(parts.values()),
            CLIP_NORM,
            mesh,
            split=frozenset(),
            tied=frozenset({"head.weight"} if tied else ()),
        )
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / mesh.data.size)
    return losses, whole(pair for part in parts.values() for pair in part.named_parameters())


def _ties(kind: str, pipeline: int) -> tuple[Tie, ...]:
    """The embedding is on the first rank, the head on the last, or at the other end of a V."""
    last = 0 if kind == "zero-bubble-v" else pipeline - 1
    return (Tie(("tokens.weight", "head.weight"), tuple(sorted({0, last}))),)


def described(*shape: int, requires_grad: bool = True) -> Tensor:
    """Describe a tensor that is sent between stages for one microbatch."""
    return torch.empty(shape, dtype=torch.float64, device="meta", requires_grad=requires_grad)


def _crossing(mesh: Mesh, *, frozen: bool, first_layer_only: bool):  # type: ignore[no-untyped-def]
    """Describe the two tensors behind a stage; a frozen embedding's rows need no gradient."""
    shape = (BATCH // mesh.data.size, SEQUENCE, WIDTH)

    def behind(index: int) -> tuple[Tensor, Tensor]:
        all_frozen = frozen and first_layer_only and index == 0
        hidden = described(*shape, requires_grad=not all_frozen)
        return hidden, described(*shape, requires_grad=not frozen)

    return behind


def _zero_levels(kind: str) -> range:
    return range(2 if kind in SPLIT else 4)


def _check(
    ranks: int,
    kind: str,
    *rest: object,
    frozen: bool = False,
    mode: Mode = "none",
    tied: bool = False,
) -> None:
    expected_losses, expected = trained_alone(MICROBATCHES, frozen=frozen, tied=tied)
    expected = expected | ({"head.weight": expected["tokens.weight"]} if tied else {})
    for losses, parameters in run_on_ranks(train, ranks, kind, *rest, frozen, mode, tied):
        assert loss_difference(losses, expected_losses) < 1e-12
        assert largest_difference(parameters, expected) < 1e-12


@pytest.mark.parametrize("kind", PER_RANK)
def test_every_schedule_trains_as_one_process(kind: str) -> None:
    _check(4, kind, 4, 0)


# Every level is tried with most schedules, and weights are tied in some cells.
LEVELS = [(kind, zero) for kind in PER_RANK for zero in _zero_levels(kind)]
TIED = [(*level, tied) for level in LEVELS for tied in (False, True)]
EVERY_SECOND = [(*level, bool(number % 2)) for number, level in enumerate(LEVELS)]
STAND = EVERY_SECOND[::2]


@pytest.mark.parametrize(("kind", "zero", "tied"), cells(TIED, STAND))
def test_every_schedule_trains_with_every_zero_level(kind: str, zero: int, *, tied: bool) -> None:
    _check(4, kind, 2, zero, tied=tied)


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("zero", [2, 3])
def test_a_backward_in_halves_refuses_what_it_would_keep_whole(kind: str, zero: int) -> None:
    (message,) = set(run_on_ranks(split_sharded, 4, kind, zero))
    assert message.startswith(f"{kind} runs backwards in halves, which keep parameters and")


def split_sharded(kind: str, zero: int) -> str:
    mesh = start(pipeline=2, data=2, tensor=1)
    module = wrap(nn.Linear(2, 2), mesh, zero=zero)
    stage = Stage(module, mesh, index=1, stages=4, receives=[described(1)], sends=[described(1)])
    with pytest.raises(RuntimeError) as caught:
        build_schedule(kind, [stage], 2)
    dist.barrier()  # nobody leaves while others are still connecting
    return str(caught.value)


FROZEN = [(kind, *((4, 0), (2, 1))[number % 2]) for number, kind in enumerate(PER_RANK)]


@pytest.mark.parametrize(
    ("kind", "pipeline", "zero"),
    cells(FROZEN, FROZEN[::2]),
)
def test_stages_may_be_frozen_and_inputs_need_no_gradient(
    kind: str, pipeline: int, zero: int
) -> None:
    _check(4, kind, pipeline, zero, frozen=True)


RECOMPUTED = [
    ("interleaved-1f1b", 2, "selective"),
    ("1f1b", 3, "full"),
    ("zero-bubble-v", 1, "selective"),
    ("zero-bubble-v", 1, "full"),
]


@pytest.mark.parametrize(
    ("kind", "zero", "mode"),
    cells(RECOMPUTED, RECOMPUTED[::3]),
)
def test_recomputation_changes_nothing(kind: str, zero: int, mode: Mode) -> None:
    _check(4, kind, 2, zero, mode=mode)


def test_stages_of_one_rank_that_share_a_parameter_are_refused() -> None:
    (message,) = set(run_on_ranks(share_a_parameter, 2))
    assert "give each stage its own copy, and name the copies in the ties" in message


def share_a_parameter() -> str:
    mesh = start(pipeline=2, data=1, tensor=1)
    module = nn.Linear(2, 2)
    stages = [
        Stage(module, mesh, index=index, stages=4, receives=[described(1)], sends=[described(1)])
        for index in (1, 2)
    ]
    try:
        build_schedule("zero-bubble-v", stages, 4)
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'2f2b' is no pipeline schedule: choose one of gpipe"):
        build_schedule("2f2b", [], 1)


class TensorParallelStage(nn.Module):
    """Layers cut over the tensor axis; from the second stage on, weights that meet no input."""

    def __init__(self, index: int, axis: Axis) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.axis = index, axis
        own = slice(axis.rank * 8 // axis.size, (axis.rank + 1) * 8 // axis.size)
        self.up = nn.Parameter(torch.randn(8, 4, dtype=torch.float64)[own].clone())
        self.down = nn.Parameter(torch.randn(4, 8, dtype=torch.float64)[:, own].clone())
        self.table = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, *received: Tensor, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, *others = received or (x,)
        inner = torch.tanh(sum_gradients(x, self.axis) @ self.up.T)
        x = x + sum_partials(inner @ self.down.T, self.axis)
        side = self.table.tanh().expand_as(x).clone()  # does not depend on what was received
        if others:
            x = x * others[0] * self.table
        if self.index < 3:
            return x, side
        return x.square().mean()[None][0]  # a view, as losses may be


@pytest.mark.parametrize("kind", SPLIT)
def test_a_split_backward_loses_no_gradient_around_collectives(kind: str) -> None:
    """Custom functions with collectives, weights used twice, weights that meet no input."""
    expected = {name: gradient for part in _alone() for name, gradient in part.items()}
    for gradients in run_on_ranks(tensor_parallel_gradients, 4, kind):
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name], rtol=0, atol=1e-12), name


def _alone() -> list[dict[str, Tensor]]:
    stages = [TensorParallelStage(index, Axis(0, 1, None)) for index in range(4)]
    for x, weight in zip(_inputs(), UNEVEN, strict=True):
        values: Tensor | tuple[Tensor, ...] = ()
        for stage in stages:
            values = stage(*values, x=x)
        assert isinstance(values, Tensor)
        (values * weight).backward()  # type: ignore[no-untyped-call]
    return [_named_gradients(stage) for stage in stages]


def tensor_parallel_gradients(kind: str) -> dict[str, Tensor]:
    mesh = start(pipeline=2, data=1, tensor=2)
    crossing = [described(3, 4)] * 2
    stages = [
        Stage(
            TensorParallelStage(index, mesh.tensor),
            mesh,
            index=index,
            stages=4,
            receives=crossing if index else (),
            sends=crossing if index < 3 else (),
        )
        for index in stage_indices(kind, mesh.pipeline.rank, 2, 2)
    ]
    build_schedule(kind, stages, 4).step([{"x": x} for x in _inputs()], UNEVEN)
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, gradient in _named_gradients(stage.submod).items():
            if name.endswith("table"):
                found[name] = gradient
                continue
            dim = 0 if name.endswith("up") else 1
            pieces = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(pieces, gradient.contiguous(), group=mesh.tensor.group)
            found[name] = torch.cat(pieces, dim)
    return found


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(4)]


def _named_gradients(stage: nn.Module) -> dict[str, Tensor]:
    return {
        f"{stage.index}.{name}": parameter.grad
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }
