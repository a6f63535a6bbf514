"""Turns a layer in its layouts into its cost on one rank, in each recompute mode.

Memory is counted by *place*: the tensor that owns the memory, and the axis of its split. If two ops
keep the same place, it counts once. A tensor used by one later layer is counted by that layer, even
if only its maker keeps it. A tensor used by several later layers is counted by its maker only. So
every tensor is counted once, whatever recompute modes the layers have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.conversions import DISPATCHES, Statistics
from autopar.planner.costs.layers.chunked_loss import Chunking, chunked_memory, chunking_of
from autopar.planner.costs.layers.flow import (
    UNSHARED,
    LayerConversion,
    LayerFlow,
    LayerMemory,
    LayerParameters,
    MemoryPlace,
    PlacedOp,
    Recomputed,
    SharedWeights,
    layer_flow,
    layer_parameters,
    learned_elements,
    recomputed_ops,
    result_bytes,
    working_bytes,
)
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import TensorOrigin
from autopar.planner.layers import Layer
from autopar.planner.precision import GRADIENT_BYTES
from autopar.planner.rules.table import takes_statistics


def layer_memory(
    flow: LayerFlow, chunking: Chunking | None = None
) -> Mapping[Recompute, LayerMemory]:
    """Return the memory of a layer in each recompute mode.

    saved = `saved_places`; transient = the largest working set + what is recomputed or fetched
    """
    everything = kept_places(flow)
    working = max((working_bytes(flow, one) for one in flow.ops), default=0)
    learning, learned_gradient = _learning(flow)
    deferred = sum(result_bytes(flow, one) for one in flow.ops if learned_elements(flow, one))
    memory = {}
    for mode in Recompute:
        kept = saved_places(flow, mode) if mode.runs_again else everything
        saved = _staying(flow, kept) if mode.is_on_host else kept
        again = sum(size for place, size in everything.items() if place not in saved)
        memory[mode] = LayerMemory(
            saved_bytes=sum(saved.values()),
            transient_bytes=working + again,
            learning_bytes=learning + again if learned_gradient else 0,
            learned_gradient_bytes=learned_gradient,
            deferred_bytes=deferred,
            host_saved_bytes=sum(kept.values()) - sum(saved.values()),
        )
    if chunking is not None:
        plain = memory[Recompute.NONE]
        memory[Recompute.CHUNKED] = chunked_memory(flow, chunking, plain, everything)
    return memory


def saved_places(flow: LayerFlow, mode: Recompute) -> dict[MemoryPlace, int]:
    """Return what a layer saves in a mode, on the device or on the host.

    A layer that does not run again saves what its ops keep. One that runs again saves its inputs,
    and the results of the ops that the mode saves.
    """
    if not mode.runs_again:
        return kept_places(flow)
    places = input_places(flow)
    for one in flow.ops:
        if mode.saves(one.op, flow.pricer.kernels) and one.is_differentiable:
            places |= _own_places(one)
            places |= dict(_places(flow, one, one.op.outputs))
    return places


def kept_places(flow: LayerFlow) -> dict[MemoryPlace, int]:
    """Return the places that a layer's ops keep without recomputation, with their bytes."""
    return {place: size for _, place, size in _kept(flow)}


def _kept(flow: LayerFlow) -> Iterator[tuple[int, MemoryPlace, int]]:
    """Yield (index of the op, place, bytes) of everything that ops keep.

    The index is −1 if other layers use the memory, too: this layer's backward does not free it.
    """
    pricer = flow.pricer
    for place, size in (_taken_over(flow) | _lent(flow)).items():
        if pricer.is_kept(place[0]):
            yield -1, place, size
    for number, one in enumerate(flow.ops):
        for place, size in _own_places(one).items():
            yield number, place, size
        for place, size in _places(flow, one, one.kept.names):
            own = flow.made_here(place[0]) and not pricer.later_users.get(place[0])
            if own or flow.takes_over(place[0]):
                yield number, place, size


def _learning(flow: LayerFlow) -> tuple[int, int]:
    """Return how far memory rises while an op with weights runs its backward, and its gradient.

    The rise is above the layer's saved bytes, and negative if more has been freed: tensors that
    only later ops keep. The gradient is that of the weight, in fp32 bytes. Of all ops, this is the
    one for which the rise and 1.5 times the gradient are largest together: the gradient is computed
    in the weight's dtype (16 bits) and copied to fp32.
    """
    keeper = {place: (number, size) for number, place, size in reversed(list(_kept(flow)))}
    kept = Counter[int]()  # bytes, by the first op that keeps them
    for number, size in keeper.values():
        kept[number] += size
    moments, freed = [], 0
    for number, one in reversed(list(enumerate(flow.ops))):
        gradient = GRADIENT_BYTES * max(learned_elements(flow, one), default=0)
        if gradient:
            moments.append((working_bytes(flow, one) - freed, gradient))
        freed += kept[number]
    return max(moments, key=lambda one: one[0] + 3 * one[1] // 2, default=(0, 0))


def input_places(flow: LayerFlow) -> dict[MemoryPlace, int]:
    """Return the inputs that a layer saves, and what it makes for several later layers."""
    return _taken_over(flow) | _lent(flow)


def _taken_over(flow: LayerFlow) -> dict[MemoryPlace, int]:
    """Return the tensors of earlier layers that this layer uses and counts."""
    places: dict[MemoryPlace, int] = {}
    for one in flow.ops:
        for name in one.op.inputs:
            root = flow.pricer.memory.root(name)
            if flow.takes_over(root) and not flow.made_here(name):
                layout = flow.produced[name]
                places.setdefault(_place(root, layout), _bytes(flow, name, layout))
    return places


def _lent(flow: LayerFlow) -> dict[MemoryPlace, int]:
    """Return what this layer makes and several later layers use, such as an encoder's output."""
    places: dict[MemoryPlace, int] = {}
    for one in flow.ops:
        for name in one.op.outputs:
            root = flow.pricer.memory.root(name)
            if flow.made_here(root) and len(flow.pricer.later_users.get(root, ())) > 1:
                layout = flow.produced[name]
                places.setdefault(_place(root, layout), _bytes(flow, name, layout))
    return places


def _staying(flow: LayerFlow, kept: Mapping[MemoryPlace, int]) -> dict[MemoryPlace, int]:
    """Return what stays on the device: what several layers use, the batch, and small tensors."""
    lent, tensors = _lent(flow), flow.pricer.graph.tensors
    return {
        place: size
        for place, size in kept.items()
        if place in lent or size < _LEAST_COPIED_BYTES
        or (place[0] in tensors and tensors[place[0]].origin is TensorOrigin.INPUT)
    }  # fmt: skip


def _own_places(one: PlacedOp) -> dict[MemoryPlace, int]:
    own = one.kept.own_bytes(one.split)
    return {(f"{one.op.name}:made", ""): own} if own else {}


def _places(
    flow: LayerFlow, one: PlacedOp, names: tuple[str, ...]
) -> Iterator[tuple[MemoryPlace, int]]:
    for name in names:
        layout = one.layout_of(name)
        yield _place(flow.pricer.memory.root(name), layout), _bytes(flow, name, layout)


def _place(root: str, layout: Layout) -> MemoryPlace:
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
    host_bytes_per_second: float = 0.0,
) -> Mapping[Recompute, LayerCost]:
    """Return the cost of a layer in each recompute mode that it may have.

    Without a link to the host (0 bytes per second), modes on the host cost the same as `none`.

    `outside` has the layouts of tensors that pass between layers (I, if it lacks one). The layer
    that makes such a tensor converts it to that layout, and pays. A layer that needs another layout
    converts it again, and pays, once per tensor and layout. `shared` are the weights that other
    layers of the same rank use, too.
    """
    flow = layer_flow(
        pricer, layer, layouts, degree=degree, shape=shape, parameters=parameters, outside=outside
    )
    chunking = chunking_of(flow)
    memory = layer_memory(flow, chunking)
    own = layer_parameters(flow, parameters, shared)
    output_bytes = _output_bytes(flow, outside)
    plain = _cost(flow, memory[Recompute.NONE], own, output_bytes=output_bytes)
    costs = {mode: _in_mode(flow, plain, mode, memory[mode]) for mode in Recompute}
    for mode in filter(lambda one: one.is_on_host, Recompute):
        cost = costs[mode] if host_bytes_per_second else costs[Recompute.NONE]
        if host_bytes_per_second:
            waits = _host_wait_seconds(flow, mode, cost, host_bytes_per_second)
            cost = replace(
                cost,
                backward_seconds=cost.backward_seconds + waits,
                recompute_seconds=cost.recompute_seconds + waits,
                host_wait_seconds=waits,
            )
        costs[mode] = cost
    if chunking is not None:
        more = _chunking_seconds(flow, chunking)
        cost = costs[Recompute.CHUNKED]
        costs[Recompute.CHUNKED] = replace(
            cost,
            backward_seconds=cost.backward_seconds + more,
            communication_seconds=cost.communication_seconds + chunking.inside_seconds,
            recompute_seconds=more,
            early_gradient_bytes=chunking.weight_bytes,
        )
    return costs


def _cost(
    flow: LayerFlow, memory: LayerMemory, own: LayerParameters, *, output_bytes: int
) -> LayerCost:
    """Return the cost of a layer of which nothing runs again."""
    whole, host = Recomputed(ops=flow.ops, conversions=flow.conversions), flow.pricer.host
    return LayerCost(
        forward_seconds=_forward(flow, whole),
        backward_seconds=_backward(flow),
        weight_gradient_seconds=sum(one.cost.weight_gradient_seconds for one in flow.ops),
        communication_seconds=_forward_wire(flow.ops, flow.conversions)
        + sum(c.cost.backward_communication_seconds for c in flow.conversions),
        recompute_seconds=0.0,
        output_bytes=output_bytes,
        **{one.name: getattr(memory, one.name) for one in fields(memory)},
        **{one.name: getattr(own, one.name) for one in fields(own)},
        measured_seconds=_measured(flow, ()),
        statistics=Statistics(
            norms=tuple(_channels(flow, flow.ops)),
            again=(),
            dispatch_seconds=0.0 if host.runs_ahead else host.forward_seconds,
        ),
    )


def _in_mode(flow: LayerFlow, plain: LayerCost, mode: Recompute, memory: LayerMemory) -> LayerCost:
    """Return the cost of a layer in a mode, from its cost if nothing runs again."""
    again = recomputed_ops(flow, mode)
    recompute = _forward(flow, again) if mode.runs_again else 0.0
    wire = _forward_wire(again.ops, again.conversions)
    return replace(
        plain,
        backward_seconds=plain.backward_seconds + recompute,
        communication_seconds=plain.communication_seconds + wire,
        recompute_seconds=recompute,
        **{one.name: getattr(memory, one.name) for one in fields(memory)},
        measured_seconds=_measured(flow, again.ops) if again.ops else plain.measured_seconds,
        statistics=replace(plain.statistics, again=tuple(_channels(flow, again.ops))),
    )


def _channels(flow: LayerFlow, ops: Iterable[PlacedOp]) -> Iterator[int]:
    """Yield the number of channels on this rank of each batch norm in training mode."""
    for one in ops:
        if takes_statistics(one.op):
            yield flow.pricer.shapes(one.op, one.split).shape(one.op.inputs[0])[1]


def _forward(flow: LayerFlow, run: Recomputed) -> float:
    """Return the seconds of a forward: the device's, or the host's if that takes longer."""
    return flow.pricer.host.forward_region_seconds(_device_forward(run), _dispatches(run))


def _dispatches(run: Recomputed) -> int:
    return sum(one.launches[0] for one in run.ops) + DISPATCHES * len(run.conversions)


def _device_forward(run: Recomputed) -> float:
    return sum(one.cost.forward_seconds + one.inside_seconds for one in run.ops) + sum(
        conversion.cost.forward_seconds for conversion in run.conversions
    )


def _forward_wire(ops: Iterable[PlacedOp], conversions: Iterable[LayerConversion]) -> float:
    """Return the seconds of a forward's collectives."""
    inside = sum(one.inside_seconds for one in ops)
    return inside + sum(c.cost.forward_communication_seconds for c in conversions)


def _backward(flow: LayerFlow, *, more_seconds: float = 0.0, launches: int = 0) -> float:
    device = more_seconds + sum(one.cost.backward_seconds for one in flow.ops)
    device += sum(conversion.cost.backward_seconds for conversion in flow.conversions)
    dispatches = launches + sum(one.launches[1] for one in flow.ops)
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


def _chunking_seconds(flow: LayerFlow, chunking: Chunking) -> float:
    """Return how much longer a loss takes in chunks."""
    moved = chunking.moved_bytes / flow.pricer.rates.own.stream_bytes_per_second
    more = _backward(flow, more_seconds=moved, launches=chunking.launches) - _backward(flow)
    return more + chunking.inside_seconds


def _host_wait_seconds(
    flow: LayerFlow, mode: Recompute, cost: LayerCost, bytes_per_second: float
) -> float:
    """Return how much longer a layer takes if what it keeps goes to the host and comes back.

        max(0, bytes ÷ link − forward) + max(0, bytes ÷ link − backward)
        + 2 · bytes ÷ memory's rate + the host's time to start two copies of each tensor

    Of equal layers, the copies to the host run beside the next layer's forward, and the copies back
    beside that layer's backward. Both waits are counted in the backward. Leaves out that layers in
    other modes between them hide more. In a pipeline, the last layer on the host, whose backward
    comes first, adds a wait (`with_first_fetch`).
    """
    kept = saved_places(flow, mode)
    size, copies = cost.host_saved_bytes, len(kept) - len(_staying(flow, kept))
    whole, host = Recomputed(ops=flow.ops, conversions=flow.conversions), flow.pricer.host
    started = _dispatches(whole) + _COPY_DISPATCHES * copies
    starting = host.forward_region_seconds(_device_forward(whole), started) - cost.forward_seconds
    starting += _backward(flow, launches=_COPY_DISPATCHES * copies) - _backward(flow)
    beside = cost.forward_seconds, cost.backward_seconds
    exposed = sum(max(0.0, size / bytes_per_second - one) for one in beside)
    return exposed + starting + 2 * size / flow.pricer.rates.own.stream_bytes_per_second


_LEAST_COPIED_BYTES = 1024  # smaller tensors stay on the device (runtime/recompute/on_host.py)
_COPY_DISPATCHES = 2  # for each tensor: the copy, and the event that it waits for
