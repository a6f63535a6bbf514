"""Data parallelism of every kind trains as one process does."""

import warnings
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from autopar.runtime.data_parallel.averaging import HALF, NOTHING
from autopar.runtime.data_parallel.wrapping import buckets_of, set_last, wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.gradients import clip_by_global_norm
from autopar.runtime.ranks.mesh import start
from autopar.runtime.recompute.running_again import recompute
from tests.cells import cells
from tests.runtime.processes import run_on_ranks
from tests.runtime.small_training import (
    CLIP_NORM,
    STEPS,
    build,
    largest_difference,
    loss_difference,
    microbatches,
    trained_alone,
    weight_decay_on_matrices,
    weights,
    whole,
)

MICROBATCHES = 3
Trained = tuple[list[float], dict[str, Tensor], int]


def train(
    shard: int | None,
    zero: int,
    always_last: bool,
    compute: torch.dtype | None,
    compress: str = NOTHING,
    offload: bool = False,
) -> Trained:
    """Train on this rank; return losses, whole parameters and the elements of optimizer states."""
    mesh = start(pipeline=1, data=dist.get_world_size(), tensor=1, shard=shard)
    model = build(torch.float64 if compute is None else torch.float32, tied=True)
    wrap(
        model,
        mesh,
        zero=zero,
        bucket_bytes=4000,
        units=[*model.layers.values(), model.tokens],
        compute_dtype=compute,
        compress=compress,
        offload=offload,
    )
    optimizer = build_optimizer([model], weight_decay_on_matrices, zero=zero, mesh=mesh)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = microbatches(step, MICROBATCHES, rank=mesh.data.rank, ranks=mesh.data.size)
        total = torch.zeros((), dtype=torch.float64)
        for index, (microbatch, weight) in enumerate(zip(mine, weights(3), strict=True)):
            set_last(model, always_last or index == MICROBATCHES - 1)
            loss = model(**microbatch) * weight
            loss.backward()
            total += loss.detach() / mesh.data.size
        clip_by_global_norm([model], CLIP_NORM, mesh, split=frozenset())
        optimizer.step()
        if mesh.data.size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return losses, whole(model.named_parameters()), sum(s.numel() for s in states if s.dim())


RANKS = ((2, 2), (4, 2), (4, 4))
EVERY = [(*ranks, zero, last) for ranks in RANKS for zero in range(4) for last in (False, True)]
STAND = [(*RANKS[zero % 2], zero, zero % 4 in (0, 3)) for zero in range(4)]


@pytest.mark.parametrize(("ranks", "shard", "zero", "always_last"), cells(EVERY, STAND))
def test_every_zero_level_trains_as_one_process(
    ranks: int, shard: int, zero: int, always_last: bool
) -> None:
    expected_losses, expected = trained_alone(MICROBATCHES, tied=True)
    for losses, parameters, _ in run_on_ranks(train, ranks, shard, zero, always_last, None):
        assert loss_difference(losses, expected_losses) < 1e-12
        assert largest_difference(parameters, expected) < 1e-12


@pytest.mark.parametrize(("ranks", "shard", "zero", "always_last"), cells(EVERY, STAND))
def test_an_optimizer_on_the_host_trains_as_one_on_the_device(
    ranks: int, shard: int, zero: int, always_last: bool
) -> None:
    expected_losses, expected = trained_alone(MICROBATCHES, tied=True)
    arguments = (shard, zero, always_last, None, NOTHING, True)
    for losses, parameters, _ in run_on_ranks(train, ranks, *arguments):
        assert loss_difference(losses, expected_losses) < 1e-12
        assert largest_difference(parameters, expected) < 1e-12


@pytest.mark.parametrize(("compute", "zero"), [(None, 0), (torch.bfloat16, 0), (None, 3)])
def test_one_device_trains_alike_with_its_optimizer_on_the_host(
    compute: torch.dtype | None, zero: int
) -> None:
    on_device, on_host = (
        run_on_ranks(train, 1, None, level, False, compute, NOTHING, offload)[0]
        for level, offload in ((0, False), (zero, True))
    )
    assert loss_difference(on_host[0], on_device[0]) < 1e-12
    assert largest_difference(on_host[1], on_device[1]) < 1e-12
    assert on_host[2] == on_device[2]


def gathers(zero: int) -> list[int]:
    """Count the gathers of each microbatch of two steps."""
    mesh = start(pipeline=1, data=2, tensor=1)
    model = build(torch.float64, tied=True)
    wrap(model, mesh, zero=zero, units=[*model.layers.values(), model.tokens])
    optimizer = build_optimizer([model], weight_decay_on_matrices, zero=zero, mesh=mesh)
    counts = []
    for step in range(2):
        mine = microbatches(step, MICROBATCHES, rank=mesh.data.rank, ranks=2)
        for index, microbatch in enumerate(mine):
            with CommDebugMode() as watched:  # type: ignore[no-untyped-call]
                set_last(model, index == MICROBATCHES - 1)
                model(**microbatch).backward()
            found = watched.get_comm_counts().items()
            counts.append(sum(number for op, number in found if "gather" in str(op)))
        optimizer.step()
        optimizer.zero_grad()
    return counts


def test_zero_2_gathers_once_for_all_microbatches_of_a_step_and_zero_3_in_every_pass() -> None:
    once, *none = run_on_ranks(gathers, 2, 2)[0][:MICROBATCHES]
    assert once > 1
    assert not any(none)
    assert run_on_ranks(gathers, 2, 2)[0][MICROBATCHES:] == [once, *none]
    in_every_pass = set(run_on_ranks(gathers, 2, 3)[0])
    assert len(in_every_pass) == 1
    assert in_every_pass.pop() > once


def test_optimizer_states_are_shared_out_evenly_by_zero_1() -> None:
    ((_, _, all_of_it),) = run_on_ranks(train, 1, None, 0, False, None)
    shares = [states for _, _, states in run_on_ranks(train, 4, 4, 1, False, None)]
    assert sum(shares) == all_of_it
    unused = 12  # elements of the layer that the loss does not reach: never given a state
    buckets = 2 + all_of_it // 2 * 8 // 4000  # the last part of each lacks up to 3 elements
    assert max(shares) - min(shares) <= 2 * (unused + 3 * buckets)


def test_zero_1_with_copies_shares_the_states_within_a_copy() -> None:
    states = [states for _, _, states in run_on_ranks(train, 4, 2, 1, False, None)]
    assert states[0] == states[2]
    assert states[1] == states[3]


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("zero", "compute"),
    cells(product(range(4), HALVES), [(zero, HALVES[zero % 2]) for zero in range(4)]),
)
def test_16_bit_training_follows_fp32_closely(zero: int, compute: torch.dtype) -> None:
    expected_losses, _ = trained_alone(MICROBATCHES, dtype=torch.float32, tied=True)
    losses, _, states = run_on_ranks(train, 2, None, zero, False, compute)[0]
    assert loss_difference(losses, expected_losses) < 0.01 * expected_losses[0]
    assert losses[-1] < losses[0]
    assert states > 0


def test_masters_keep_what_16_bits_would_lose() -> None:
    # A step of 1e-4 on a weight of 1 is below half a unit of bf16: without masters nothing moves.
    (moved,) = set(run_on_ranks(step_finely, 2))
    assert moved == pytest.approx(1.0 - 100 * 1e-4, abs=4e-3)


def step_finely() -> float:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    wrap(model, mesh, zero=1, compute_dtype=torch.bfloat16)
    optimizer = build_optimizer([model], lambda p: torch.optim.SGD(p, lr=1e-4), zero=1, mesh=mesh)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return model.weight.item()


@pytest.mark.parametrize("zero", [0, 2])
def test_compressed_gradients_train_nearly_as_whole_ones(zero: int) -> None:
    expected_losses, _ = trained_alone(MICROBATCHES, tied=True)
    losses, parameters, _ = run_on_ranks(train, 2, None, zero, False, None, HALF)[0]
    assert loss_difference(losses, expected_losses) < 1e-2
    assert largest_difference(parameters, trained_alone(MICROBATCHES, tied=True)[1]) > 0


def test_a_parameter_that_the_loss_does_not_reach_keeps_no_gradient() -> None:
    for reached, unreached in run_on_ranks(gradients_present, 2):
        assert reached
        assert not unreached


def gradients_present() -> tuple[bool, bool]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = build()
    wrap(model, mesh, zero=0)
    model(**microbatches(0, 1)[0]).backward()
    return model.head.weight.grad is not None, model.unused.weight.grad is not None


def test_buckets_follow_their_size() -> None:
    assert run_on_ranks(bucket_sizes, 2, 1)[0] == [4, 40, 16]  # none too small for one gradient
    assert run_on_ranks(bucket_sizes, 2, 50)[0] == [44, 16]
    assert run_on_ranks(bucket_sizes, 2, 10**6)[0] == [60]


def bucket_sizes(bucket_bytes: int) -> Sequence[int]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(10, 1))
    wrap(model, mesh, zero=0, bucket_bytes=bucket_bytes)
    buckets = buckets_of(model)
    assert buckets is not None
    model.register_forward_hook(lambda *_: None)
    loss = _sum_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    return [buffer.nbytes for buffer in buckets.buffers]


def _sum_of(model: nn.Sequential) -> Tensor:
    for hook in list(model._forward_pre_hooks.values()):
        hook(model, ())
    return sum((parameter.sum() for parameter in model.parameters()), torch.zeros(()))


def sharing() -> nn.Sequential:
    shared = nn.Linear(4, 4)
    return nn.Sequential(nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(shared))


def frozen_at_first() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))


def channels_last() -> nn.Sequential:
    convolution = nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 4, 3, padding=1))
    model = nn.Sequential(convolution, nn.Linear(1, 4))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def sharded_names(build_model: Callable[[], nn.Sequential]) -> list[str]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = build_model()
    wrap(model, mesh, zero=3, units=list(model))
    model(torch.ones(2, 4)).sum().backward()
    return [name for name, one in model.named_modules() if hasattr(one, "unshard")]


def test_units_that_share_a_module_are_sharded_with_what_is_around_them() -> None:
    assert run_on_ranks(sharded_names, 2, sharing) == [[""], [""]]


def test_layers_that_do_not_learn_are_gathered_one_by_one_as_well() -> None:
    assert run_on_ranks(sharded_names, 2, frozen_at_first) == [["", "0", "1"]] * 2


def test_weights_that_lie_in_another_order_are_sharded() -> None:
    assert not next(channels_last().parameters()).is_contiguous()
    assert run_on_ranks(sharded_names, 2, channels_last) == [["", "0"]] * 2


class Direct(nn.Module):
    """Calls the forward of its layers by its name, and by their own, in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer.forward(x) if i % 2 else layer(x))
        return x.sum()


class Noting(nn.Linear):
    """Leaves what it makes in a dict, where others find it."""

    def forward(self, x: Tensor, notes: dict[str, list[Tensor]]) -> Tensor:  # type: ignore[override]
        made = torch.tanh(super().forward(x))
        notes.setdefault("made", []).append(made)
        return sum(notes["made"], x)


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Noting(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        notes: dict[str, list[Tensor]] = {}
        for layer in self.layers:
            x = layer(x, notes)
        return torch.stack([x, *notes["made"]]).square().sum()


def gradients_in_two_passes(model: Direct | Noted) -> dict[str, Tensor]:
    for _ in range(2):
        model(torch.linspace(-1, 1, 16).view(2, 8)).backward()
    gradients = ((name, one.grad) for name, one in model.named_parameters())
    return whole((name, nn.Parameter(grad)) for name, grad in gradients if grad is not None)


def sharded_gradients(kind: type[Direct | Noted], zero: int) -> dict[str, Tensor]:
    mesh = start(pipeline=1, data=2, tensor=1)
    model = kind()
    for layer in model.layers[2:]:
        recompute(layer, "full")
    wrap(model, mesh, zero=zero, units=list(model.layers))
    return gradients_in_two_passes(model)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("kind", [Direct, Noted])
def test_layers_have_their_parameters_and_leave_to_others_what_they_make(
    kind: type[Direct | Noted], zero: int
) -> None:
    expected = gradients_in_two_passes(kind())
    for found in run_on_ranks(sharded_gradients, 2, kind, zero):
        assert found.keys() == expected.keys()
        assert largest_difference(found, expected) < 1e-5


def test_a_model_that_was_built_in_16_bits_trains_in_fp32_where_that_is_asked() -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    made = wrap(nn.Linear(2, 2).half(), mesh, zero=0, compute_dtype=torch.float32)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}


def warnings_of_views() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = wrap(nn.Sequential(nn.Linear(4, 4)), start(pipeline=1, data=2, tensor=1), zero=3)
        module(torch.ones(2, 3, 4)).sum().backward()
    return [str(one.message) for one in caught if "view" in str(one.message)]


def test_nobody_is_warned_of_views_that_nothing_writes_to() -> None:
    assert run_on_ranks(warnings_of_views, 2) == [[], []]
