"""Turns a layer in its layouts into its cost on one rank, in each recompute mode.

Memory is counted by *place*: the tensor that owns the memory, and the axis of its split. If two ops
keep the same place, it counts once. A tensor used by one later layer is counted by that layer, even
if only its maker keeps it. A tensor used by several later layers is counted by its maker only. So
every tensor is counted once, whatever recompute modes the layers have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.conversions import DISPATCHES, Statistics
from autopar.planner.costs.layers.flow import (
    UNSHARED,
    Again,
    HeldParameters,
    LayerConversion,
    LayerFlow,
    PlacedOp,
    SharedWeights,
    layer_flow,
    layer_parameters,
    run_again,
)
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import TensorOrigin
from autopar.planner.layers import Layer
from autopar.planner.precision import GRADIENT_BYTES
from autopar.planner.rules.rule import OpKind, Traffic
from autopar.planner.rules.table import kind_of, rule_of, takes_statistics

Place = tuple[str, str]  # the name of the tensor that owns the memory; the axis of its split, or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """The memory that a layer saves for its backward, and its peak beyond that.

    `learning_bytes` is the peak while an op with weights runs its backward, without tensors that
    later ops have freed. `learned_gradient_bytes` is the weight's gradient in fp32. Both are those
    of the op with the largest sum. `deferred_bytes` are the output gradients of all ops with
    weights: a split backward holds them, and all saved tensors, from its first half to its second.
    """

    saved_bytes: int
    transient_bytes: int
    learning_bytes: int
    learned_gradient_bytes: int
    deferred_bytes: int


def layer_memory(flow: LayerFlow) -> Mapping[Recompute, LayerMemory]:
    """Return the memory of a layer in each recompute mode.

    saved = `saved_places`; transient = the largest working set + what is made again
    """
    everything = kept_places(flow)
    working = max((_working(flow, one) for one in flow.ops), default=0)
    learning, learned_gradient = _learning(flow)
    deferred = sum(_result_bytes(flow, one) for one in flow.ops if _weights(flow, one))
    memory = {}
    for mode in Recompute:
        saved = saved_places(flow, mode)
        again = sum(size for place, size in everything.items() if place not in saved)
        memory[mode] = LayerMemory(
            saved_bytes=sum(saved.values()),
            transient_bytes=working + again,
            learning_bytes=learning + again if learned_gradient else 0,
            learned_gradient_bytes=learned_gradient,
            deferred_bytes=deferred,
        )
    return memory


def saved_places(flow: LayerFlow, mode: Recompute) -> dict[Place, int]:
    """Return what a layer saves in a mode.

    A layer that does not run again saves what its ops keep. Another one saves its inputs, and the
    results of the ops that the mode saves.
    """
    if not mode.runs_again:
        return kept_places(flow)
    places = input_places(flow)
    for one in flow.ops:
        if flow.saves(mode, one) and one.is_differentiable:
            places |= _own_places(one)
            places |= dict(_places(flow, one, one.op.outputs))
    return places


def kept_places(flow: LayerFlow) -> dict[Place, int]:
    """Return the places that a layer's ops keep without recomputation, with their bytes."""
    return {place: size for _, place, size in _kept(flow)}


def _kept(flow: LayerFlow) -> Iterator[tuple[int, Place, int]]:
    """Yield op index, place and bytes of everything that ops keep; −1 if it outlives the layer."""
    pricer = flow.pricer
    for place, size in (_taken_over(flow) | _lent(flow)).items():
        if pricer.is_kept(place[0]):
            yield -1, place, size
    for number, one in enumerate(flow.ops):
        for place, size in _own_places(one).items():
            yield number, place, size
        for place, size in _places(flow, one, one.kept.seen):
            own = flow.made_here(place[0]) and not pricer.later_users.get(place[0])
            if own or flow.takes_over(place[0]):
                yield number, place, size


def _learning(flow: LayerFlow) -> tuple[int, int]:
    """Return the peak while an op with weights runs its backward, and this weight's gradient.

    Tensors that only later ops keep have been freed by then. The gradient is computed in
    the weight's dtype (16 bits) and copied to fp32: 1.5 times its fp32 bytes count.
    """
    keeper = {place: (number, size) for number, place, size in reversed(list(_kept(flow)))}
    kept = Counter[int]()  # bytes, by the first op that keeps them
    for number, size in keeper.values():
        kept[number] += size
    moments, freed = [], 0
    for number, one in reversed(list(enumerate(flow.ops))):
        gradient = GRADIENT_BYTES * max(_weights(flow, one), default=0)
        if gradient:
            moments.append((_working(flow, one) - freed, gradient))
        freed += kept[number]
    return max(moments, key=lambda one: one[0] + 3 * one[1] // 2, default=(0, 0))


def input_places(flow: LayerFlow) -> dict[Place, int]:
    """Return the inputs that a layer saves, and what it makes for several later layers."""
    return _taken_over(flow) | _lent(flow)


def _taken_over(flow: LayerFlow) -> dict[Place, int]:
    """Return the tensors of earlier layers that this layer uses and counts."""
    places: dict[Place, int] = {}
    for one in flow.ops:
        for name in one.op.inputs:
            root = flow.pricer.memory.root(name)
            if flow.takes_over(root) and not flow.made_here(name):
                layout = flow.produced[name]
                places.setdefault(_place(root, layout), _bytes(flow, name, layout))
    return places


def _lent(flow: LayerFlow) -> dict[Place, int]:
    """Return what this layer makes and several later layers use, such as an encoder's output."""
    places: dict[Place, int] = {}
    for one in flow.ops:
        for name in one.op.outputs:
            root = flow.pricer.memory.root(name)
            if flow.made_here(root) and len(flow.pricer.later_users.get(root, ())) > 1:
                layout = flow.produced[name]
                places.setdefault(_place(root, layout), _bytes(flow, name, layout))
    return places


def _weights(flow: LayerFlow, one: PlacedOp) -> list[int]:
    """Return this rank's number of elements of each trained weight of an op."""
    known = flow.pricer.parameters
    return [
        flow.pricer.elements(name, layout, flow.degree)
        for name, layout in zip(one.op.inputs, one.layout.needs, strict=True)
        if name in known and known[name].trainable
    ]


def _result_bytes(flow: LayerFlow, one: PlacedOp) -> int:
    return sum(
        flow.pricer.tensor_bytes(name, one.layout_of(name), flow.degree) for name in one.op.outputs
    )


def _working(flow: LayerFlow, one: PlacedOp) -> int:
    """Return the bytes of an op's results and of gradients of its inputs; a loss needs more."""
    if rule_of(one.op.target).traffic is Traffic.NONE:
        return 0
    pricer, tensors = flow.pricer, flow.pricer.graph.tensors
    results = _result_bytes(flow, one)
    if not one.is_differentiable:
        return results
    gradients = sum(
        pricer.tensor_bytes(name, layout, flow.degree)
        for name, layout in zip(one.op.inputs, one.layout.needs, strict=True)
        if tensors[name].requires_grad and tensors[name].origin is TensorOrigin.OP
    )
    if kind_of(one.op) is OpKind.CROSS_ENTROPY:
        gradients += _log_probability_bytes(flow, one, gradients)
    return results + gradients


def _log_probability_bytes(flow: LayerFlow, one: PlacedOp, logit_bytes: int) -> int:
    """Return a loss's memory in addition to the gradient of its logits.

    If the classes are split (runtime/tensor/vocabulary.py), the gradient of the logits is computed
    in fp32 before it is cast. Otherwise this is the gradient of the log-probabilities, in the dtype
    in which the loss keeps them. If that is wider than the logits', the gradient of the logits is
    first made in it, too.
    """
    logits = one.op.inputs[0]
    layout = one.layout_of(logits)
    if flow.pricer.shapes(one.op, one.split).form is not None:
        return 4 * flow.pricer.elements(logits, layout, flow.degree)
    made = one.kept.own_bytes(one.split) or flow.pricer.tensor_bytes(logits, layout, flow.degree)
    return made + max(0, made - logit_bytes)


def _own_places(one: PlacedOp) -> dict[Place, int]:
    own = one.kept.own_bytes(one.split)
    return {(f"{one.op.name}:made", ""): own} if own else {}


def _places(flow: LayerFlow, one: PlacedOp, names: tuple[str, ...]) -> Iterator[tuple[Place, int]]:
    for name in names:
        layout = one.layout_of(name)
        yield _place(flow.pricer.memory.root(name), layout), _bytes(flow, name, layout)


def _place(root: str, layout: Layout) -> Place:
    return root, layout.axis if layout.kind is LayoutKind.SPLIT else ""


def _bytes(flow: LayerFlow, name: str, layout: Layout) -> int:
    return flow.pricer.memory_bytes(name, layout, flow.degree)


_NOTHING: Mapping[str, Layout] = MappingProxyType({})


def layer_costs(
    pricer: OpPricer,
    layer: Layer,
    layouts: Sequence[OpLayout],
    *,
    degree: int,
    shape: GroupShape,
    parameters: Mapping[str, Layout],
    outside: Mapping[str, Layout] = _NOTHING,
    shared: SharedWeights = UNSHARED,
) -> Mapping[Recompute, LayerCost]:
    """Return the cost of a layer in each recompute mode.

    `outside` has the layouts of tensors that pass between layers (by default I; the layer that
    makes a tensor converts it). `shared` are the weights that other layers of the same rank use,
    too. A conversion is paid once per tensor and needed layout, by the layer that needs it.
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
    flow: LayerFlow,
    mode: Recompute,
    memory: LayerMemory,
    held: HeldParameters,
    *,
    output_bytes: int,
) -> LayerCost:
    again = run_again(flow, mode)
    recompute = _forward(flow, again) if mode.runs_again else 0.0
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
    """Yield the number of channels on this rank of each batch norm in training mode."""
    for one in ops:
        if takes_statistics(one.op):
            yield flow.pricer.shapes(one.op, one.split).shape(one.op.inputs[0])[1]


def _forward(flow: LayerFlow, run: Again) -> float:
    """Return the seconds of a forward: the device's, or the host's if that takes longer."""
    return flow.pricer.host.forward_region_seconds(_device_forward(run), _dispatches(run))


def _dispatches(run: Again) -> int:
    return sum(one.launches[0] for one in run.ops) + DISPATCHES * len(run.conversions)


def _device_forward(run: Again) -> float:
    return sum(one.cost.forward_seconds + one.inside_seconds for one in run.ops) + sum(
        conversion.cost.forward_seconds for conversion in run.conversions
    )


def _forward_wire(ops: Iterable[PlacedOp], conversions: Iterable[LayerConversion]) -> float:
    """Return the seconds of a forward's collectives."""
    inside = sum(one.inside_seconds for one in ops)
    return inside + sum(c.cost.forward_communication_seconds for c in conversions)


def _backward(flow: LayerFlow) -> float:
    device = sum(one.cost.backward_seconds for one in flow.ops)
    device += sum(conversion.cost.backward_seconds for conversion in flow.conversions)
    dispatches = sum(one.launches[1] for one in flow.ops)
    dispatches += sum(conversion.cost.backward_dispatches for conversion in flow.conversions)
    return flow.pricer.host.backward_region_seconds(device, dispatches)


def _measured(flow: LayerFlow, again: Iterable[PlacedOp]) -> float:
    """Return the measured seconds of forward, backward and recomputation.

    If the host was measured, dispatching these ops is included.
    """
    ops = [one for one in flow.ops if one.cost.measured]
    repeated = [one for one in again if one.cost.measured]
    forward = sum(one.cost.forward_seconds for one in ops)
    backward = sum(one.cost.backward_seconds for one in ops)
    recompute = sum(one.cost.forward_seconds for one in repeated)
    host = flow.pricer.host
    if not host.is_measured:
        return forward + backward + recompute
    # An op that moves nothing takes only its dispatch, so it counts as measured.
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
    """Return the bytes that a rank sends to the next stage, if a stage ends with this layer."""
    pricer = flow.pricer
    return sum(
        pricer.tensor_bytes(name, outside.get(name) or flow.produced.get(name, WHOLE), flow.degree)
        for name in pricer.residence.cuts[flow.position]
    )
