"""Tests that unlike devices that share the data have the rows that suit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from autopar.planner.cluster.cluster import Cluster, Device
from autopar.planner.cluster.file import parse_cluster
from autopar.planner.cluster.shape import RowShare
from autopar.planner.costs.prediction import Arrangement, Recompute, Zero
from autopar.planner.costs.steps.step import predict
from autopar.planner.findings.rows import may_be_uneven
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.search.points import MOST_SHARES, uneven
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.search.space import divisors
from autopar.planner.plan.solving.candidate import layer_key
from autopar.planner.plan.solving.costing import SearchSubject, slowest
from autopar.planner.trace import trace
from tests.field.cells import AWKWARD
from tests.planner.plan.plans import parts_of
from tests.planner.plan.searches import TINY_GPT2, declared, planned

H100, A100, V100, T4 = "h100-sxm", "a100-80gb-sxm", "v100-32gb-sxm", "t4"
SMALL = (
    ((H100, 1), (T4, 1)),
    ((V100, 1), (T4, 1)),
    ((A100, 2), (T4, 1)),
    ((T4, 2), (A100, 2)),
    ((H100, 1), (V100, 1), (T4, 1)),
)
MODEL = ("gpt2.py", "size=124m", "layers=2")


def cluster(nodes: tuple[tuple[str, int], ...]) -> Cluster:
    sections = "".join(
        f'[[nodes]]\ndevice = "{name}"\ndevices = {count}\n' for name, count in nodes
    )
    return parse_cluster(f'{sections}[network]\nlike = "infiniband-hdr"\n', where="test")


@pytest.mark.parametrize("nodes", SMALL, ids=str)
def test_no_other_rows_are_better(nodes: tuple[tuple[str, int], ...]) -> None:
    """Every number of microbatches and every share is priced by the prediction."""
    machines = cluster(nodes)
    size = machines.size
    places: dict[str, Any] = {
        "global_batch": 4 * size, "precision": "fp16", "pins__dp": size, "pins__zero": 0,
        "compile": "none",
    }  # fmt: skip
    graph, axes, layers = parts_of(*MODEL)
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    explorer = Explorer(subject, machines, declared(**places))
    best = min(_seconds(explorer, one) for one in _arrangements(explorer, 4 * size))
    plan = planned(MODEL, machines, **places)
    assert plan.prediction.step_seconds == pytest.approx(best, rel=1e-9)


def test_faster_devices_have_more_rows() -> None:
    plan = planned(MODEL, cluster(((T4, 1), (A100, 1))), global_batch=16, precision="fp16",
                   pins__dp=2)  # fmt: skip
    rows = dict(zip((one.name for one in plan.cluster.devices), plan.arrangement.rows, strict=True))
    assert rows[A100] > rows[T4]
    even = planned(MODEL, cluster(((T4, 1), (A100, 1))), global_batch=16, precision="fp16",
                   pins__dp=2, pins__microbatch=8)  # fmt: skip
    assert plan.prediction.step_seconds < even.prediction.step_seconds
    assert not even.arrangement.rows


def test_many_shares_are_chosen_by_their_slowest_kind() -> None:
    """Of 32 rows, were one kind three times as fast as the other, it has 24."""
    machines = cluster(((T4, 1), (A100, 1)))

    def seconds(device: Device, rows: int) -> float:
        return rows * (1.0 if device.name == A100 else 3.0)

    point = replace(_point(machines), data=2, microbatch=16, microbatches=1)
    found = [
        dict(zip((one.name for one in machines.devices), share.rows, strict=True))
        for share in uneven(point, machines, global_batch=32, least=1, seconds=seconds)
        if share.microbatches == 1
    ]
    assert len(found) == MOST_SHARES
    assert found[0] == {T4: 8, A100: 24}


@pytest.mark.parametrize(
    "model", [TINY_GPT2, ("resnet.py",), ("bert.py",), ("t5.py",), ("vit.py",), ("llama.py",)]
)
def test_models_of_one_mean_may_have_uneven_rows(model: tuple[str, ...]) -> None:
    """Batch norms, too: they count the rows of each rank."""
    graph, _, _ = parts_of(*model)
    assert may_be_uneven(graph)


@pytest.mark.parametrize("name", ["pairs", "views"])
def test_rows_that_meet_stay_even(name: str) -> None:
    subject = AWKWARD[name]
    file = load_model_file(str(subject.path), subject.arguments)
    assert not may_be_uneven(trace(file))


def _point(machines: Cluster) -> Arrangement:
    graph, axes, layers = parts_of(*TINY_GPT2)
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    explorer = Explorer(subject, machines, declared(global_batch=8, precision="fp16"))
    return next(iter(explorer.points))


def _arrangements(explorer: Explorer, batch: int) -> Iterator[Arrangement]:
    devices = explorer.costing.cluster.devices
    kinds = list(Counter(devices).items())
    first = next(iter(explorer.points))
    point = replace(first, rows=(), zero=Zero.NONE, shard=len(devices), order=0)
    for microbatches in divisors(batch):
        block = batch // microbatches
        for each in product(range(1, block + 1), repeat=len(kinds)):
            if sum(rows * count for rows, (_, count) in zip(each, kinds, strict=True)) != block:
                continue
            own = {device: rows for rows, (device, _) in zip(each, kinds, strict=True)}
            rows = tuple(own[device] for device in devices)
            yield replace(point, rows=rows, microbatch=max(rows), microbatches=microbatches)


def _seconds(explorer: Explorer, arrangement: Arrangement) -> float:
    """Return the least step of an arrangement; memory suffices for all of it."""
    devices = explorer.costing.cluster.devices
    inside = layer_key(arrangement, 0)
    shares = {RowShare(*pair) for pair in zip(devices, arrangement.rows, strict=True)}
    row = slowest([explorer.costing.rows(inside, share) for share in shares])
    return min(
        predict(
            [[modes[Recompute.NONE] for modes in row]],
            replace(arrangement, bucket_bytes=size, compression=compressed),
            explorer.costing.cluster,
            constants=explorer.solver.questions.constants,
            model_flops=explorer.solver.model_flops,
        ).step_seconds
        for size in explorer.solver.demands.bucket_bytes
        for compressed in explorer.choices.compressed
    )
