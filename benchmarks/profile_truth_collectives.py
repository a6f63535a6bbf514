"""Compares predicted with measured times of the collectives that plans for two gloo ranks call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from autopar.planner.cluster.cluster import Backend, Cluster, Collective
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.layers.flow import LayerConversion, LayerFlow, layer_flow
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.layouts import Layout, conversion
from autopar.planner.plan.again import parts_of
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.plan import Plan
from autopar.planner.profile.measured import MeasuredFile
from autopar.planner.profile.net import link_cases, net_of, sample
from autopar.planner.programs.layouts.rules import find_slots, own_layouts
from autopar.planning import make_plan

RANKS = 2
BUCKET_BYTES = 25 * 2**20
GRADIENT_BYTES = 4
Model = tuple[str, tuple[str, ...], int]  # file, arguments, batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One collective of one plan, as predicted and as run."""

    model: str
    reason: str
    collective: Collective
    payload_bytes: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """Return predicted ÷ measured seconds − 1."""
        return self.predicted_seconds / self.measured_seconds - 1


def collective_rows(models: Sequence[Model]) -> list[CollectiveRow]:
    """Measure the link and the plans' collectives in turns; predict the latter from the link."""
    plain = choose_cluster(RANKS, "cpu")
    wanted = [one for model in models for one in _wanted(model, plain)]
    calls = list(dict.fromkeys((collective, size) for _, _, collective, size in wanted))
    cases = link_cases()
    taken = sample([*cases, *calls], backend=Backend.GLOO, ranks=RANKS)
    # predictions come from the link's samples alone, measurements from the calls' alone
    seen, run = taken[: len(cases)], taken[len(cases) :]
    seconds = {(one.collective, one.payload_bytes): one.seconds for one in run}
    net = net_of(seen, device_name="cpu", backend=Backend.GLOO, ranks=RANKS)
    shape = group_shape(MeasuredFile(nets=(net,)).on(plain), RANKS, 1)
    return [
        CollectiveRow(
            model=model,
            reason=reason,
            collective=collective,
            payload_bytes=size,
            predicted_seconds=collective_seconds(collective, size, shape),
            measured_seconds=seconds[collective, size],
        )
        for model, reason, collective, size in wanted
    ]


def _wanted(model: Model, machines: Cluster) -> Iterator[tuple[str, str, Collective, int]]:
    """Yield the collectives of a model's plans: gradient buckets, conversions of activations."""
    file, _, batch = model
    name = file.rpartition("/")[2]
    plan = _tensor_plan(model, machines)
    total = GRADIENT_BYTES * plan.model.parameters
    bucket = total // ceil(total / BUCKET_BYTES)
    yield name, "gradients, dp 2", Collective.ALL_REDUCE, bucket
    for collective, size in dict.fromkeys(_conversions(plan, machines, batch)):
        yield name, "activations, tp 2", collective, size


def _tensor_plan(model: Model, machines: Cluster) -> Plan:
    file, arguments, batch = model
    constraints = gathered_constraints(
        [f"tp={RANKS},microbatch={batch}"], {"global_batch": str(batch), "precision": "fp32"}, None
    )
    return make_plan(file, arguments, machines, constraints, time_limit_seconds=None)


def _conversions(plan: Plan, machines: Cluster, batch: int) -> Iterator[tuple[Collective, int]]:
    """Yield the collectives of the layers, forward and backward, with their payloads."""
    axes, layers = parts_of(plan, where="the plan")
    device = machines.devices[0]
    pricer = OpPricer(
        plan.graph,
        axes,
        batch=batch,
        precision=plan.arrangement.precision,
        device=device,
        layers=layers,
    )
    slots = find_slots(plan.graph, axes, layers)
    parameters = {one.name: one.layout for one in plan.parameters}
    outside: dict[str, Layout] = {}
    for layer in layers.layers:
        layouts = own_layouts(plan.layouts, layer, axes, slots)
        flow = layer_flow(
            pricer,
            layer,
            layouts,
            degree=RANKS,
            shape=group_shape(machines, RANKS, 1),
            parameters=parameters,
            outside=dict(outside),
        )
        for one in flow.conversions:
            yield from _calls(flow, one)
        for op, layout in zip(layer.ops, layouts, strict=True):
            outside.update(zip(op.outputs, layout.gives, strict=True))


def _calls(flow: LayerFlow, one: LayerConversion) -> Iterator[tuple[Collective, int]]:
    produced = flow.produced[one.tensor]
    step = conversion(produced, one.needed)
    if step is None:
        return
    sizes = [flow.pricer.tensor_bytes(one.tensor, x, RANKS) for x in (produced, one.needed)]
    has_gradient = flow.pricer.graph.tensors[one.tensor].requires_grad
    for call in (step.forward, step.backward if has_gradient else None):
        if call is Collective.ALL_REDUCE:
            yield call, max(sizes)
        elif isinstance(call, Collective):
            yield call, min(sizes) * (1 if call is Collective.ALL_TO_ALL else RANKS)
