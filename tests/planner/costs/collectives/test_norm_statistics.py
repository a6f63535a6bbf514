"""What synchronised batch norms wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.collectives.conversions import NO_WAIT, Statistics, synchronising
from autopar.planner.costs.prediction import Recompute
from autopar.planner.costs.steps.step import predict
from tests.planner.costs.layers.test_layer import alone
from tests.planner.costs.ops.op_factories import layer_of, pricer
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, SILENT

CLUSTER = choose_cluster(8, "h100-sxm")
ALL, ONE = group_shape(CLUSTER, 8, 1), group_shape(CLUSTER, 1, 1)
TWO_NORMS = Statistics(norms=(64, 256))


def test_a_norm_gathers_means_variances_and_rows_and_adds_two_sums_per_channel() -> None:
    found = synchronising(TWO_NORMS, ALL)
    gathers = [4 * (2 * channels + 1) * 8 for channels in (64, 256)]
    sums = [4 * 2 * channels for channels in (64, 256)]
    assert found.collectives == 4
    assert found.payload_bytes == sum(gathers) + sum(sums)
    assert found.forward_seconds == pytest.approx(
        sum(collective_seconds(Collective.ALL_GATHER, size, ALL) for size in gathers)
    )
    assert found.backward_seconds == pytest.approx(
        sum(collective_seconds(Collective.ALL_REDUCE, size, ALL) for size in sums)
    )


def test_what_runs_again_gathers_again_in_the_backward() -> None:
    again = synchronising(replace(TWO_NORMS, again=TWO_NORMS.norms), ALL)
    once = synchronising(TWO_NORMS, ALL)
    assert again.forward_seconds == once.forward_seconds
    assert again.backward_seconds == pytest.approx(once.backward_seconds + once.forward_seconds)


def test_one_rank_waits_for_nobody() -> None:
    assert synchronising(TWO_NORMS, ONE) == NO_WAIT


def test_every_microbatch_of_a_step_waits_in_both_passes() -> None:
    shared = replace(ARRANGEMENT, data=8, microbatches=3)
    plain, synchronised = (
        predict([[layer]], shared, CLUSTER, constants=SILENT, model_flops=1)
        for layer in (LAYER, replace(LAYER, statistics=TWO_NORMS))
    )
    wait = synchronising(TWO_NORMS, ALL)
    more = 3 * (wait.forward_seconds + wait.backward_seconds)
    assert synchronised.step_seconds - plain.step_seconds == pytest.approx(more)
    (term,) = (one for one in synchronised.communication if "batch norms" in one.reason)
    assert term.count == 12
    assert term.exposed_seconds == pytest.approx(more)


def test_a_layer_knows_the_channels_of_its_norms_and_which_run_again() -> None:
    prices = pricer("resnet.py")
    costs = alone(prices, layer_of(prices, "BasicBlock"))
    assert costs[Recompute.NONE].statistics.norms == (16, 16)
    assert costs[Recompute.NONE].statistics.again == ()
    assert costs[Recompute.FULL].statistics.again == (16, 16)
