"""Turns one layer in its layouts into what it costs one rank, under each recompute mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.conversions import DISPATCHES
from autopar.planner.costs.collectives.norm_statistics import Statistics
from autopar.planner.costs.layers.flow import Conversion, LayerFlow, PlacedOp, layer_flow
from autopar.planner.costs.layers.memory import LayerMemory, layer_memory
from autopar.planner.costs.layers.parameters import (
    UNSHARED,
    Held,
    SharedWeights,
    layer_parameters,
)
from autopar.planner.costs.layers.recompute import Again, run_again
from autopar.planner.costs.ops.pricer import Pricer
from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.layers import Layer
from autopar.planner.layouts import WHOLE, Layout, OpLayout
from autopar.planner.rules.table import takes_statistics

_NOTHING: Mapping[str, Layout] = MappingProxyType({})


def layer_costs(
    pricer: Pricer,
    layer: Layer,
    layouts: Sequence[OpLayout],
    *,
    degree: int,
    shape: GroupShape,
    parameters: Mapping[str, Layout],
    outside: Mapping[str, Layout] = _NOTHING,
    shared: SharedWeights = UNSHARED,
) -> Mapping[Recompute, LayerCost]:
    """Return what a layer costs under every recompute mode.

    `outside` are the layouts in which tensors pass from one layer to others (I where it does not
    say; the layer that makes one converts it), and
    `shared` the weights that other layers of the same rank use too. A conversion is
    paid once per tensor and needed layout, by the layer that needs it.
    """
    flow = layer_flow(
        pricer, layer, layouts, degree=degree, shape=shape, parameters=parameters, outside=outside
    )
    memory = layer_memory(flow)
    held = layer_parameters(flow, parameters, shared)
    output_bytes = _output_bytes(flow, outside)
    return {
        mode: _cost(flow, mode, memory[mode], held, output_bytes=output_bytes) for mode in Recompute
    }


def _cost(
    flow: LayerFlow, mode: Recompute, memory: LayerMemory, held: Held, *, output_bytes: int
) -> LayerCost:
    again = run_again(flow, mode)
    recompute = 0.0 if mode is Recompute.NONE else _forward(flow, again)
    whole, host = Again(ops=flow.ops, conversions=flow.conversions), flow.pricer.host
    return LayerCost(
        forward_seconds=_forward(flow, whole),
        backward_seconds=_backward(flow) + recompute,
        weight_gradient_seconds=sum(one.cost.weight_gradient_seconds for one in flow.ops),
        communication_seconds=_forward_wire(flow.ops, flow.conversions)
        + sum(c.cost.backward_communication_seconds for c in flow.conversions)
        + _forward_wire(again.ops, again.conversions),
        recompute_seconds=recompute,
        saved_bytes=memory.saved_bytes,
        transient_bytes=memory.transient_bytes,
        learning_bytes=memory.learning_bytes,
        learned_gradient_bytes=memory.learned_gradient_bytes,
        waiting_gradient_bytes=held.waiting_gradient_bytes,
        deferred_bytes=memory.deferred_bytes,
        output_bytes=output_bytes,
        parameters=held.elements,
        trainable=held.trainable,
        trainable_tensors=held.trainable_tensors,
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=held.gradient_bytes,
        optimizer_bytes=held.optimizer_bytes,
        replicated_gradient_bytes=held.replicated_gradient_bytes,
        measured_seconds=_measured(flow, again.ops),
        statistics=Statistics(
            norms=tuple(_channels(flow, flow.ops)),
            again=tuple(_channels(flow, again.ops)),
            dispatch_seconds=0.0 if host.runs_ahead else host.forward_seconds,
        ),
    )


def _channels(flow: LayerFlow, ops: Iterable[PlacedOp]) -> Iterator[int]:
    """Yield how many channels each batch norm that takes statistics has on this rank."""
    for one in ops:
        if takes_statistics(one.op):
            yield flow.pricer.shapes(one.op, one.split).shape(one.op.inputs[0])[1]


def _forward(flow: LayerFlow, run: Again) -> float:
    """Return the seconds of a forward: the device's, or the host's where it takes longer."""
    return flow.pricer.host.forward_region_seconds(_device_forward(run), _dispatches(run))


def _dispatches(run: Again) -> int:
    return len(run.ops) + DISPATCHES * len(run.conversions)


def _device_forward(run: Again) -> float:
    return sum(one.cost.forward_seconds + one.inside_seconds for one in run.ops) + sum(
        conversion.cost.forward_seconds for conversion in run.conversions
    )


def _forward_wire(ops: Iterable[PlacedOp], conversions: Iterable[Conversion]) -> float:
    """Return the seconds of a forward's collectives."""
    inside = sum(one.inside_seconds for one in ops)
    return inside + sum(c.cost.forward_communication_seconds for c in conversions)


def _backward(flow: LayerFlow) -> float:
    device = sum(one.cost.backward_seconds for one in flow.ops)
    device += sum(conversion.cost.backward_seconds for conversion in flow.conversions)
    dispatches = sum(one.is_differentiable for one in flow.ops)
    dispatches += sum(conversion.cost.backward_dispatches for conversion in flow.conversions)
    return flow.pricer.host.backward_region_seconds(device, dispatches)


def _measured(flow: LayerFlow, again: Iterable[PlacedOp]) -> float:
    """Return the seconds that were measured, of forward, backward and what runs again.

    Where the host was measured too, dispatching these ops is among them.
    """
    ops = [one for one in flow.ops if one.cost.measured]
    repeated = [one for one in again if one.cost.measured]
    forward = sum(one.cost.forward_seconds for one in ops)
    backward = sum(one.cost.backward_seconds for one in ops)
    recompute = sum(one.cost.forward_seconds for one in repeated)
    host = flow.pricer.host
    if not host.is_measured:
        return forward + backward + recompute
    # What moves nothing takes its dispatch alone, so it counts as measured.
    free = [one for one in flow.ops if not one.cost.measured and _is_free(one)]
    learned = sum(one.is_differentiable for one in (*ops, *free))
    return (
        host.forward_region_seconds(forward, len(ops) + len(free))
        + host.backward_region_seconds(backward, learned)
        + host.forward_region_seconds(recompute, len(repeated))
    )


def _is_free(one: PlacedOp) -> bool:
    return one.cost.forward_seconds + one.cost.backward_seconds == 0.0


def _output_bytes(flow: LayerFlow, outside: Mapping[str, Layout]) -> int:
    """Return the bytes that cross the cut behind this layer, on one rank."""
    pricer = flow.pricer
    return sum(
        pricer.tensor_bytes(name, outside.get(name) or flow.produced.get(name, WHOLE), flow.degree)
        for name in pricer.residence.cuts[flow.position]
    )
