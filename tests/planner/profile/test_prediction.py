"""A profile's figures reach the terms of a prediction, each with where it comes from."""

from functools import cache

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.sheet import find_device
from autopar.planner.costs.ops.measurements import Provenance, Timing
from autopar.planner.costs.prediction import Prediction
from autopar.planner.costs.steps.framework import framework_constants, read_framework_constants
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.plan import Model
from autopar.planner.plan.search.search import search
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile, MeasuredOp
from autopar.planner.profile.probes import Probe, find_probes
from tests.planner.costs.ops.op_factories import known, pricer
from tests.planner.profile.measurements import TIMES, host, net

BATCH = 8
TIMING = Timing(forward_seconds=0.5, backward_seconds=1.0)


def predicted(measured: MeasuredFile | None, *, devices: int = 1) -> Prediction:
    """Return the prediction of a small perceptron with the whole batch at once."""
    graph, axes, layers = known("mnist.py")
    wanted = {"global_batch": str(BATCH * devices), "precision": "fp32"}
    cluster = choose_cluster(devices, "cpu")
    return search(
        graph,
        axes,
        layers,
        MODEL,
        measured.on(cluster) if measured else cluster,
        gathered_constraints([f"microbatch={BATCH},dp={devices}"], wanted, None),
        measured=measured,
    ).prediction


MODEL = Model(
    name="mnist", spec="mnist.py", arguments=(), source_hash="", graph_hash="", parameters=1,
    has_loss=True, has_dataset=False, has_optimizer=False, has_scheduler=False, tokens_per_row=1,
)  # fmt: skip


@cache
def probes() -> tuple[Probe, ...]:
    prices = pricer("mnist.py", batch=BATCH, precision=Precision.FP32, device_name="cpu")
    return find_probes(prices, degrees=(1,))


def profile_of(*, most: int = 1000, timing: Timing = TIMING) -> MeasuredFile:
    """Return a profile of some ops, each with the same times."""
    ops = tuple(
        MeasuredOp(key=probe.key, timing=timing, samples=9, torch="2.13.0")
        for probe in probes()[:most]
    )
    return MeasuredFile(ops=ops, hosts=(host(),))


def provenance(prediction: Prediction) -> dict[str, Provenance]:
    return {term.name: term.provenance for term in prediction.terms}


def test_without_a_profile_every_term_is_a_formula() -> None:
    assert set(provenance(predicted(None)).values()) == {Provenance.FORMULA}


def test_a_profile_of_all_ops_and_the_host_measures_the_computing() -> None:
    prediction = predicted(profile_of())
    found = provenance(prediction)
    assert found["compute"] is Provenance.MEASURED
    assert found["optimizer"] is Provenance.MEASURED
    assert found["host overhead"] is Provenance.MEASURED
    assert found["exposed data parallel"] is Provenance.FORMULA


def test_a_profile_of_some_ops_is_mixed() -> None:
    some = profile_of(most=2, timing=Timing(forward_seconds=1e-6, backward_seconds=1e-6))
    assert provenance(predicted(some))["compute"] is Provenance.MIXED


def test_a_measured_step_is_the_sum_of_what_was_measured() -> None:
    graph, _, _ = known("mnist.py")
    prediction = predicted(profile_of())
    terms = {term.name: term.seconds for term in prediction.terms}
    calls = sum(probe.uses for probe in probes())
    learned = sum(probe.uses for probe in probes() if probe.is_differentiable)
    # Every op takes its half second, and a second backward; dispatch is microseconds of each op.
    computing = 0.5 * calls + 1.0 * learned
    views = len(graph.ops) - calls
    assert terms["compute"] == pytest.approx(computing, abs=(calls + views) * 5e-6 + 1e-9)
    parameters = sum(graph.tensors[p.name].numel.at(1) for p in graph.parameters)
    tensors = len(graph.parameters)
    assert terms["optimizer"] == pytest.approx(parameters * 1e-9 + tensors * 4e-6)
    assert terms["host overhead"] == pytest.approx(TIMES.step_seconds + 2 * TIMES.action_seconds)


def test_a_measured_link_makes_communication_measured_and_formula() -> None:
    measured = MeasuredFile(hosts=(host(),), nets=(net(),))
    found = provenance(predicted(measured, devices=2))
    assert found["exposed data parallel"] is Provenance.MIXED


def test_constants_are_measured_only_where_the_hosts_of_all_devices_are() -> None:
    measured = profile_of()
    cpu, a10 = find_device("cpu"), find_device("a10")
    shipped = read_framework_constants()
    assert framework_constants([cpu], measured).step_seconds == TIMES.step_seconds
    assert framework_constants([cpu, a10], measured) == shipped
    assert framework_constants([cpu]).step_seconds == shipped.step_seconds


def test_a_process_on_a_cpu_has_no_context_of_a_device() -> None:
    alone = framework_constants([find_device("cpu")])
    assert alone.context_bytes < read_framework_constants().context_bytes
    assert alone.communicator_bytes == 0
