"""Tests that the planner itself chooses which kind of node comes where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest

from autopar.codegen.script.settings_lines import docstring
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import parse_cluster
from autopar.planner.cluster.shape import RowShare
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.costs.schedules.table import rank_of
from autopar.planner.costs.steps.step import predict
from autopar.planner.plan.declared.constraints import Declared, StagePin
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.solving.candidate import layer_key
from autopar.planner.plan.solving.costing import SearchSubject, slowest
from tests.cells import cells
from tests.planner.plan.plans import parts_of
from tests.planner.plan.searches import TINY_GPT2, declared, planned

H100, A100, V100, T4 = "h100-sxm", "a100-80gb-sxm", "v100-32gb-sxm", "t4"
NETWORKS = ("infiniband-hdr", "ethernet-10")


@dataclass(frozen=True, slots=True)
class Case:
    """Nodes of so many devices each, in the order of a file."""

    nodes: tuple[tuple[str, int], ...]
    network: str = "infiniband-hdr"
    batch: int = 8

    def __str__(self) -> str:
        return f"{' '.join(f'{count}×{name}' for name, count in self.nodes)} on {self.network}"

    def cluster(self) -> Cluster:
        sections = "".join(
            f'[[nodes]]\ndevice = "{name}"\ndevices = {count}\n' for name, count in self.nodes
        )
        return parse_cluster(f'{sections}[network]\nlike = "{self.network}"\n', where="test")


SWAPPED = (
    Case(((A100, 2), (V100, 2))),
    Case(((H100, 1), (T4, 1)), network="ethernet-10"),
    Case(((H100, 2), (A100, 1), (T4, 1))),
    Case(((A100, 1), (H100, 2), (V100, 1)), network="ethernet-10"),
    Case(((H100, 1), (T4, 1), (H100, 1), (T4, 1)), network="ethernet-10"),
)
MORE_SWAPPED = (
    Case(((A100, 2), (V100, 2)), network="ethernet-10"),
    Case(((H100, 4), (A100, 4)), batch=16),
    Case(((T4, 2), (A100, 2))),
    Case(((H100, 1), (A100, 1), (V100, 2))),
    Case(((V100, 2), (T4, 2), (T4, 2), (A100, 2))),
    Case(((H100, 2), (T4, 2), (H100, 2), (T4, 2)), network="ethernet-10"),
)


def plan_of(case: Case) -> Plan:
    return planned(TINY_GPT2, case.cluster(), global_batch=case.batch, precision="fp16")


@pytest.mark.parametrize("case", cells((*SWAPPED, *MORE_SWAPPED), SWAPPED[:2]), ids=str)
def test_swapping_nodes_changes_no_figure(case: Case) -> None:
    plan, other = plan_of(case), plan_of(replace(case, nodes=case.nodes[::-1]))
    proofs = [replace(one.proof, search_seconds=0.0) for one in (plan, other)]
    assert proofs[0] == proofs[1]
    assert replace(other, proof=plan.proof) == plan


def stage_pin(modules: str, stage: int) -> Declared:
    """The demand that modules run on one stage."""
    value = StagePin(modules=modules, stage=stage)
    return Declared(place=f"stages.{modules}", field="stages", value=value, text="", origin="")


SMALL = tuple(
    Case(nodes, network=network)
    for nodes in (
        ((A100, 1), (V100, 1)),
        ((H100, 1), (T4, 1)),
        ((T4, 1), (A100, 1), (A100, 1)),
        ((H100, 1), (V100, 1), (T4, 1)),
        ((T4, 2), (H100, 2)),
    )
    for network in NETWORKS
)


PINNED = [(case, degree) for case in SMALL for degree in (2, 3) if not case.cluster().size % degree]


@pytest.mark.parametrize(
    ("case", "pipeline"),
    [
        *cells(PINNED, PINNED[::4]),
        *cells(
            [(case, None) for case in SMALL[1::2]],
            [(case, None) for case in SMALL[1:2]],
        ),
    ],
    ids=str,
)
def test_no_other_place_of_the_nodes_is_better(case: Case, pipeline: int | None) -> None:
    """Every order, arrangement and cut is priced by the prediction; nothing is solved.

    With a pinned pipeline the first block ends a stage, so that the cut is no choice.
    """
    pins = [] if pipeline is None else [stage_pin("h.0", 0), stage_pin("h.1", 1)]
    if pipeline == 3:
        pins.append(stage_pin("ln_f", 2))
    places: dict[str, Any] = {
        "global_batch": 4 * case.cluster().size,
        "precision": "fp16",
        "limits__tp": 1,
    }
    if pipeline is not None:
        places["pins__pp"] = pipeline
    graph, axes, layers = parts_of(*TINY_GPT2)
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    orders = {replace(case, nodes=nodes).cluster() for nodes in permutations(case.nodes)}
    explorer = Explorer(subject, case.cluster(), declared(*pins, **places))
    best = min(_seconds(explorer, one) for one in orders)
    plan = planned(TINY_GPT2, case.cluster(), *pins, **places)
    assert plan.prediction.step_seconds == pytest.approx(best, rel=1e-9)


def _seconds(explorer: Explorer, cluster: Cluster) -> float:
    """Return the least step on one order of the nodes; memory suffices for all of it."""
    points = [point for point in explorer.points if point.order == 0]
    return min(
        _priced(explorer, replace(variant, bucket_bytes=size), cut, cluster)
        for point in points
        for variant in explorer.points.variants(point)
        for cut in _cuts(explorer, variant)
        for size in explorer.solver.demands.bucket_bytes
    )


def _cuts(explorer: Explorer, arrangement: Arrangement) -> Iterator[tuple[int, ...]]:
    """Yield where stages begin and end, wherever they may."""
    layers, stages = len(explorer.subject.layers.layers), arrangement.pipeline
    demands = explorer.solver.demands
    allowed, pins = demands.is_cuttable, demands.pins
    places = [place for place in range(1, layers) if allowed[place - 1]]
    for inner in combinations(places, stages * arrangement.stages_per_rank - 1):
        cut = (0, *inner, layers)
        if all(cut[one.stage] <= one.layer < cut[one.stage + 1] for one in pins):
            yield cut


def _priced(
    explorer: Explorer, arrangement: Arrangement, cut: Sequence[int], cluster: Cluster
) -> float:
    if arrangement.rows:  # which are those of the ranks in the planner's order
        cluster = explorer.costing.cluster_of(arrangement)
    width = arrangement.data * arrangement.tensor
    each = arrangement.rows or (arrangement.microbatch,) * arrangement.data
    inside = layer_key(arrangement, 0)
    costs = []
    for stage, (first, stop) in enumerate(pairwise(cut)):
        rank = rank_of(arrangement.schedule, stage, arrangement.pipeline)
        devices = cluster.devices[rank * width : (rank + 1) * width]
        shares = dict.fromkeys(
            RowShare(device, each[place // arrangement.tensor])
            for place, device in enumerate(devices)
        )
        row = slowest([explorer.costing.rows(inside, share) for share in shares])
        costs.append([modes[Recompute.NONE] for modes in row[first:stop]])
    return predict(
        costs,
        arrangement,
        cluster,
        constants=explorer.solver.questions.constants,
        model_flops=explorer.solver.model_flops,
        tied_gradient_bytes=explorer.costing.tied_gradient_bytes(inside),
    ).step_seconds


def test_a_script_tells_which_node_rank_is_which_machine() -> None:
    plan = plan_of(SWAPPED[0])
    text = " ".join(docstring(plan, "train.py").split())
    first, last = (f"2 × {node.device.name}" for node in plan.cluster.nodes)
    assert {first, last} == {f"2 × {A100}", f"2 × {V100}"}
    assert f"NODE says which is which: 0 is {first}, 1 is {last}." in text


def test_each_pipeline_rank_has_the_limit_of_its_own_devices() -> None:
    """The whole memory of one kind must not be measured by the limit of another."""
    case = SMALL[0]
    plan = planned(TINY_GPT2, case.cluster(), global_batch=8, precision="fp16", pins__pp=2)
    limits = dict(plan.machines.limits)
    assert limits[A100] > limits[V100]
    for rank, device in enumerate(plan.cluster.devices):
        assert plan.limit_bytes(rank) == limits[device.name]
