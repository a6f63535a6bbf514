from dataclasses import replace

import pytest

from autopar.planner.cluster.cluster import Collective, content_hash
from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.collectives.choice import cheapest, collective_seconds
from autopar.planner.costs.collectives.conversions import Statistics, synchronising
from autopar.planner.costs.ops.case import OpSplit
from autopar.planner.errors import InputError
from autopar.planner.graph.layouts import PARTIAL, WHOLE
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile
from autopar.planner.rules.signature import leaves
from tests.planner.costs.ops.op_factories import pricer
from tests.planner.profile.measurements import TIMES, everything, host, net, op


def test_figures_of_the_latest_torch_stand_in_for_older_ones() -> None:
    old, new = op(1.0, torch="2.9.1"), op(2.0, torch="2.13.0+cpu")
    for ops in ((old, new), (new, old)):
        timing = MeasuredFile(ops=ops).seconds(old.key)
        assert timing is not None
        assert timing.forward_seconds == 2.0


def test_what_was_not_measured_has_no_figure() -> None:
    assert MeasuredFile(ops=(op(),)).seconds(op(rows=9).key) is None
    assert MeasuredFile(hosts=(host(),)).host("h100-sxm") is None
    assert MeasuredFile(hosts=(host(),)).host("cpu") == TIMES


def test_profiling_again_adds_ops_and_renews_those_that_were_there() -> None:
    first = MeasuredFile(ops=(op(1.0), op(1.0, rows=9)), hosts=(host(),))
    both = first.merged(MeasuredFile(ops=(op(3.0), op(3.0, rows=10)), nets=(net(),)))
    found = [both.seconds(op(rows=rows).key) for rows in (8, 9, 10)]
    assert [one.forward_seconds for one in found if one] == [3.0, 1.0, 3.0]
    assert both.hosts == (host(),)
    assert both.nets == (net(),)


def test_figures_of_another_number_of_threads_are_not_mixed_in() -> None:
    with pytest.raises(InputError, match="OMP_NUM_THREADS"):
        everything().merged(MeasuredFile(hosts=(host(threads=2),)))


def test_a_measured_link_replaces_that_of_its_device_alone() -> None:
    cpus, gpus = choose_cluster(2, "cpu"), choose_cluster(2, "a100")
    joined = everything().on(cpus)
    assert joined.nodes[0].link.bytes_per_second == 2e9
    assert joined.levels[0].units[0].link == joined.nodes[0].link
    assert everything().on(gpus) == gpus
    assert content_hash(joined) != content_hash(cpus)


def test_a_measured_link_of_one_device_is_not_that_of_another() -> None:
    both = parse_cluster(
        """
        nodes = [{device = "l4", devices = 2}, {device = "a10", devices = 2}]
        network = {like = "ethernet-100"}
        """,
        where="a test",
    )
    joined = MeasuredFile(nets=(replace(net(), device="a10"),)).on(both)
    assert [one.link.bytes_per_second for one in joined.nodes] == [32e9, 2e9]
    assert [one.link for one in joined.levels[0].units] == [one.link for one in joined.nodes]
    assert joined.levels[1] == both.levels[1]


def test_a_collective_takes_what_it_took_where_it_was_measured() -> None:
    alone, joined = choose_cluster(2, "cpu"), everything().on(choose_cluster(2, "cpu"))
    shape, unknown = group_shape(joined, 2, 1), group_shape(alone, 2, 1)
    assert collective_seconds(Collective.ALL_REDUCE, 1_000, shape) == 1e-3
    assert collective_seconds(Collective.ALL_REDUCE, 0, shape) == 0.0
    for other, where in ((Collective.ALL_GATHER, shape), (Collective.ALL_REDUCE, unknown)):
        assert cheapest(other, 1_000, where).algorithm != "as measured"


def test_tensor_ranks_and_batch_norms_take_the_measured_times() -> None:
    shape = group_shape(everything().on(choose_cluster(2, "cpu")), 2, 1)
    norms = synchronising(Statistics(norms=(64,)), shape)
    assert norms.backward_seconds == collective_seconds(Collective.ALL_REDUCE, 512, shape) > 0

    prices = pricer("mnist.py", batch=4, precision=Precision.FP32, device_name="cpu")
    loss = prices.graph.ops[-1]
    assert loss.target == "aten.cross_entropy_loss.default"
    logits = loss.inputs[0]
    assert prices.conversion_seconds(logits, PARTIAL, WHOLE, 2, shape) == (1e-3, 0.0)
    assert prices.inside_seconds(loss, None, shape) == 0.0
    ((letter, axis),) = (
        (letter, leaf.name)
        for letter, dim in prices.axes.ops[loss.name].letters.items()
        for leaf in leaves(dim)
        if dim == prices.axes.dims[logits][1]
    )
    split_loss = OpSplit(letter=letter, axis=axis, degree=2)
    gathered = collective_seconds(Collective.ALL_GATHER, 2 * 4 * 4 * 4, shape)  # 4 rows, 4 figures
    assert prices.inside_seconds(loss, split_loss, shape) == gathered


def test_a_measured_collective_takes_what_was_measured() -> None:
    shape = group_shape(everything().on(choose_cluster(2, "cpu")), 2, 1)
    way = cheapest(Collective.ALL_REDUCE, 1_000_000, shape)
    assert way.seconds == pytest.approx(3e-3)
    assert way.algorithm == "as measured"
    # The others have the link's fitted line: 60 us of the library, 100 us, 1 MB ÷ (0.73 · 2 GB/s),
    # and √(4.9 us · 0.685 ms) = 58 us to fill the pipe.
    other = cheapest(Collective.POINT_TO_POINT, 1_000_000, shape)
    assert other.seconds == pytest.approx(160e-6 + 1e6 / (0.73 * 2e9) + 58e-6, rel=1e-3)
