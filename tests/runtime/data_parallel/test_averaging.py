"""Compressed gradients: what is sent, what is lost, and what happens to it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.planner.costs.steps.stage_load import sent_bytes
from autopar.planner.precision import SCALED_TOGETHER, Compression, thin_bytes
from autopar.runtime.checkpointing.states import errors_held, restore_errors
from autopar.runtime.data_parallel.averaging import (
    BLOCK,
    COMPRESSORS,
    HALF,
    INT8,
    NOTHING,
    POWERSGD,
    RANK,
    Averaging,
    Feedback,
    orthonormal,
    packed,
    unpacked,
)
from autopar.runtime.data_parallel.wrapping import buckets_of, wrap
from autopar.runtime.ranks.mesh import ALONE, start
from autopar.runtime.tensor.shards import Chunks
from tests.runtime.processes import run_on_ranks

ELEMENTS = 8 * BLOCK


def test_rounding_is_off_by_half_a_step_at_most() -> None:
    x = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    x[BLOCK : 2 * BLOCK] *= 1e-6
    x[2 * BLOCK :] = 0.0
    made = unpacked(packed(x), x.dtype)
    steps = x.view(3, -1).abs().amax(1, keepdim=True) / 127
    assert bool(((x - made).view(3, -1).abs() <= 0.5001 * steps).all())
    assert made.view(3, -1).abs().amax(1).tolist() == pytest.approx(
        x.view(3, -1).abs().amax(1).tolist()
    )


def test_columns_are_made_orthonormal_and_noise_is_replaced() -> None:
    wide = torch.randn(50, RANK, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alike = wide.clone()
    alike[:, 2] = alike[:, 0] - 3 * alike[:, 1] + 1e-15 * wide[:, 2]  # nothing but rounding errors
    noisy = alike.clone()
    noisy[:, 2] -= 1e-15 * wide[:, 3]
    for matrix in (wide, alike, torch.zeros_like(wide)):
        made = orthonormal(matrix)
        assert torch.allclose(made.T @ made, torch.eye(RANK, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(made @ (made.T @ matrix), matrix, atol=1e-12)
    assert torch.allclose(orthonormal(noisy), orthonormal(alike), atol=1e-9)


def test_a_matrix_of_low_rank_is_sent_as_it_is_and_others_lose_what_is_kept() -> None:
    compressor, feedback = COMPRESSORS[POWERSGD](torch.device("cpu")), Feedback()
    generator = torch.Generator().manual_seed(1)
    thin = torch.randn(40, 3, generator=generator) @ torch.randn(3, 30, generator=generator)
    flat = thin.flatten().clone()
    alone = Averaging(shard=ALONE, replica=ALONE)
    found = compressor.started(flat, [flat.view(40, 30)], alone, feedback).value()
    assert torch.allclose(found.view(40, 30), thin, atol=1e-4)
    whole = torch.randn(40, 30, generator=generator)
    given, sent = torch.zeros(1200), torch.zeros(1200)
    for _ in range(60):  # what is lost in one step is sent in later ones
        flat = whole.flatten().clone()
        given += flat
        sent += compressor.started(flat, [flat.view(40, 30)], alone, feedback).value()
    assert feedback.own is not None
    assert torch.allclose(sent + feedback.own, given, atol=1e-2)
    assert float((sent - given).norm() / given.norm()) < 0.2


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_an_overflow_stays_one_and_is_not_kept_for_the_next_step(wrong: float) -> None:
    flat = torch.ones(2 * BLOCK)
    flat[5] = wrong
    found, lost = run_on_ranks(averaged_alone, 1, flat)[0]
    assert not bool(found[:BLOCK].isfinite().any())
    assert found[BLOCK:].tolist() == pytest.approx([1.0] * BLOCK)
    assert bool(lost.isfinite().all())


def averaged_alone(flat: Tensor) -> tuple[Tensor, Tensor]:
    mesh = start(pipeline=1, data=1, tensor=1)
    model = nn.Linear(1, 1)
    wrap(model, mesh, compute_dtype=None)
    made = COMPRESSORS[INT8](mesh.device)
    lost = Feedback()
    found = made.started(flat.clone(), (), Averaging(shard=ALONE, replica=ALONE), lost).value()
    assert lost.own is not None
    return found, lost.own


def test_both_sides_have_the_same_kinds_and_blocks() -> None:
    compressor = COMPRESSORS[POWERSGD](torch.device("cpu"))
    for rows, columns in ((64, 64), (10, 10**4), (20, 12), (16, 16), (16, 17)):
        elements = rows * columns
        sent = 4 * RANK * (rows + columns)
        is_taken = compressor.takes(torch.empty(rows, columns))
        assert thin_bytes(rows, elements) == (sent if is_taken else 4 * elements)
    assert SCALED_TOGETHER == BLOCK
    assert {one.value for one in Compression if one.keeps_lost} == set(COMPRESSORS)
    assert {one.value for one in Compression} == {NOTHING, HALF, *COMPRESSORS}


class Sent(TorchDispatchMode):
    """Counts the bytes of each collective: of the largest tensor that it takes or makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves(args)
            size = max(one.nbytes for one in leaves if isinstance(one, Tensor))
            self.bytes[func.name().rpartition("::")[2].strip("_")] += size
        return func(*args, **(kwargs or {}))


def sent_by(zero: int, shard: int | None, compress: str, width: int = 8) -> dict[str, int]:
    mesh = start(pipeline=1, data=4, tensor=1, shard=shard)
    model = nn.Sequential(nn.Linear(BLOCK, width, bias=False), nn.Linear(width, BLOCK, bias=False))
    wrap(model, mesh, zero=zero, compress=compress)
    with Sent() as sent:
        model(torch.ones(1, BLOCK)).square().sum().backward()
    return dict(sent.bytes)


SMALL = 2 * ELEMENTS * (BLOCK + 4) // BLOCK  # of both weights in int8, with scales


@pytest.mark.parametrize(
    ("zero", "shard", "expected"),
    [
        (0, None, {"alltoall_base": SMALL, "allgather_base": SMALL}),
        (1, 4, {"alltoall_base": SMALL}),
        (
            1, 2,
            {
                "reduce_scatter_base": 8 * ELEMENTS,
                "alltoall_base": SMALL // 2, "allgather_base": SMALL // 2,
            },
        ),
    ],
)  # fmt: skip
def test_bytes_on_the_wire_are_a_quarter_and_the_scales(
    zero: int, shard: int | None, expected: dict[str, int]
) -> None:
    assert run_on_ranks(sent_by, 4, zero, shard, INT8)[0] == expected
    assert sent_bytes(8 * ELEMENTS, 0, 0, Compression.INT8) == SMALL  # as it is priced
    (whole,) = {sum(one.values()) for one in run_on_ranks(sent_by, 4, 0, None, NOTHING)}
    assert whole == 8 * ELEMENTS


@pytest.mark.parametrize(("zero", "shard", "axes"), [(0, None, 1), (1, 4, 1), (1, 2, 2)])
def test_powersgd_sends_both_thin_matrices_over_each_axis(
    zero: int, shard: int | None, axes: int
) -> None:
    width = 32
    thin = 2 * thin_bytes(width, width * BLOCK)
    assert thin == 2 * 4 * RANK * (width + BLOCK)  # in fp32; as it is priced
    sent = run_on_ranks(sent_by, 4, zero, shard, POWERSGD, width)[0]
    assert sent == {"allreduce": axes * thin}


class Stored:
    """Tensors of a checkpoint, by key."""

    def __init__(self, ranks: list[dict[str, list[tuple[Chunks, Tensor]]]]) -> None:
        self.parts: dict[str, list[tuple[Chunks, Tensor]]] = {}
        for rank in ranks:
            for key, parts in rank.items():
                self.parts.setdefault(key, []).extend(parts)

    @property
    def keys(self) -> set[str]:
        return set(self.parts)

    def whole(self, key: str) -> Tensor:
        found = torch.full(self.parts[key][0][0].global_shape, torch.nan)
        for chunks, tensor in self.parts[key]:
            found[tuple(slice(*held[0]) for held in chunks.ranges)] = tensor
        return found

    def fill(self, key: str, held: Chunks, tensor: Tensor) -> None:
        tensor.copy_(self.whole(key)[tuple(slice(*one[0]) for one in held.ranges)])


Parts = dict[str, list[tuple[Chunks, Tensor]]]


def lost_after_a_step(zero: int, stored: list[Parts] | None) -> tuple[Parts, str | None]:
    """Return what a rank has lost after a step, or what it has after restoring."""
    mesh = start(pipeline=1, data=torch.distributed.get_world_size(), tensor=1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 50), nn.Tanh(), nn.Linear(50, 11))
    wrap(model, mesh, zero=zero, compress=INT8)
    buckets, note = buckets_of(model), None
    assert buckets is not None
    if stored is not None:
        note = restore_errors(Stored(stored), [model])
    else:
        torch.manual_seed(mesh.data.rank)
        model(torch.randn(4, 7)).square().sum().backward()
    found: Parts = {}
    for part in errors_held([model]):
        found.setdefault(part.key, []).append((part.chunks, part.tensor.clone()))
    return found, note


def in_all(ranks: list[tuple[Parts, str | None]]) -> Tensor:
    """Return the sum of everything that was lost."""
    stored = Stored([found for found, _ in ranks])
    names = {key.split("/", 2)[2] for key in stored.keys}
    return torch.cat(
        [
            torch.stack([stored.whole(k) for k in sorted(stored.keys) if k.endswith(name)])
            .sum(0)
            .flatten()
            for name in sorted(names)
        ]
    )


@pytest.mark.parametrize(("zero", "other", "ranks"), [(0, 0, 4), (0, 1, 2), (1, 0, 2), (1, 1, 4)])
def test_what_was_lost_goes_on_under_other_ranks_as_a_whole(
    zero: int, other: int, ranks: int
) -> None:
    before = run_on_ranks(lost_after_a_step, 2, zero, None)
    stored = [found for found, _ in before]
    after = run_on_ranks(lost_after_a_step, ranks, other, stored)
    assert in_all(before).abs().max() > 0
    assert torch.allclose(in_all(after), in_all(before), atol=1e-7)
    told = "the errors of compressed gradients on 2 ranks are shared out among"
    assert after[0][1] == f"{told} {ranks}"
    same = run_on_ranks(lost_after_a_step, 2, zero, stored)
    assert same[0][1] is None
    for (found, _), (expected, _) in zip(same, before, strict=True):
        assert found.keys() == expected.keys()
        for key, parts in expected.items():
            for (_, one), (_, its) in zip(found[key], parts, strict=True):
                assert torch.equal(one, its)
