"""Says what a layer keeps from its forward to its backward, and what it takes while it runs.

Memory is counted by *place*: whose memory a tensor lies in, and along which axis it is split. Two
ops that keep the same place keep it once. What one later layer uses is counted by that layer, also
where only its maker keeps it; what several later layers use is counted by its maker, and by no
other. So every tensor is counted once, whichever recompute modes the layers have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.planner.costs.layers.flow import LayerFlow, PlacedOp
from autopar.planner.costs.ops.split_loss import splits_classes
from autopar.planner.costs.prediction import Recompute
from autopar.planner.layouts import Kind, Layout
from autopar.planner.ops import Origin
from autopar.planner.precision import GRADIENT_BYTES
from autopar.planner.rules.rule import OpKind, Traffic
from autopar.planner.rules.table import kind_of, rule_of

Place = tuple[str, str]  # the root's name; the axis of its split, or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """What one layer keeps for its backward, and the most that it takes beside that.

    `learning` is what it takes while one op with weights runs, the one whose gradient makes that
    moment the fullest; what the ops behind it have freed is subtracted. `learned_gradient` is that
    gradient in fp32. `deferred` are the gradients of the results of all ops with weights: a split
    backward holds them, and all that is kept, from its first half to its second.
    """

    saved_bytes: int
    transient_bytes: int
    learning_bytes: int
    learned_gradient_bytes: int
    deferred_bytes: int


def layer_memory(flow: LayerFlow) -> Mapping[Recompute, LayerMemory]:
    """Return the memory of a layer under every recompute mode.

    none:       saved = what the ops keep;              transient = the largest working set
    selective:  saved = inputs + results of contractions;   transient = that + what is made again
    full:       saved = inputs;                             transient = that + what is made again
    """
    everything, inputs = kept_places(flow), input_places(flow)
    working = max((_working(flow, one) for one in flow.ops), default=0)
    learning, learned_gradient = _learning(flow)
    deferred = sum(_result_bytes(flow, one) for one in flow.ops if _weights(flow, one))
    costly = dict(inputs)
    for one in flow.ops:
        if one.is_contraction and one.is_differentiable:
            costly |= _own_places(one)
            costly |= dict(_places(flow, one, one.op.outputs))
    modes = {Recompute.NONE: everything, Recompute.SELECTIVE: costly, Recompute.FULL: inputs}
    memory = {}
    for mode, saved in modes.items():
        again = sum(size for place, size in everything.items() if place not in saved)
        memory[mode] = LayerMemory(
            saved_bytes=sum(saved.values()),
            transient_bytes=working + again,
            learning_bytes=learning + again if learned_gradient else 0,
            learned_gradient_bytes=learned_gradient,
            deferred_bytes=deferred,
        )
    return memory


def kept_places(flow: LayerFlow) -> dict[Place, int]:
    """Return what the ops of a layer keep where nothing is computed again."""
    return {place: size for _, place, size in _kept(flow)}


def _kept(flow: LayerFlow) -> Iterator[tuple[int, Place, int]]:
    """Yield what each op keeps, with the number of the op; −1 where it outlives the layer."""
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
    """Return the fullest moment of an op with weights: what it takes, and a weight's gradient.

    The backward has freed by then what only ops behind it keep. The gradient comes in the type of
    the weight and is copied in fp32, so one and a half times its bytes count.
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
    """Return what a layer has to keep to be run again, and what it keeps for later layers."""
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
    """Return what is made here and used by several later layers, such as an encoder's result."""
    places: dict[Place, int] = {}
    for one in flow.ops:
        for name in one.op.outputs:
            root = flow.pricer.memory.root(name)
            if flow.made_here(root) and len(flow.pricer.later_users.get(root, ())) > 1:
                layout = flow.produced[name]
                places.setdefault(_place(root, layout), _bytes(flow, name, layout))
    return places


def _weights(flow: LayerFlow, one: PlacedOp) -> list[int]:
    """Return how many elements this rank has of each weight of an op that is trained."""
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
    """A loss also has the gradient of its log-probabilities, as large as the logits."""
    if rule_of(one.op.target).traffic is Traffic.NONE:
        return 0
    pricer, tensors = flow.pricer, flow.pricer.graph.tensors
    results = _result_bytes(flow, one)
    if not one.is_differentiable:
        return results
    gradients = sum(
        pricer.tensor_bytes(name, layout, flow.degree)
        for name, layout in zip(one.op.inputs, one.layout.needs, strict=True)
        if tensors[name].requires_grad and tensors[name].origin is Origin.OP
    )
    if kind_of(one.op) is OpKind.CROSS_ENTROPY:
        gradients += _log_probability_bytes(flow, one, gradients)
    return results + gradients


def _log_probability_bytes(flow: LayerFlow, one: PlacedOp, logit_bytes: int) -> int:
    """Return what a loss has beside the gradient of its logits.

    That is the gradient of the log-probabilities, in the logits' dtype, unless it computes in fp32.
    It does where the classes are split (runtime/tensor/vocabulary.py), and where it keeps them so:
    then the gradient of the logits is made in fp32, too.
    """
    logits = one.op.inputs[0]
    layout = one.layout_of(logits)
    if splits_classes(flow.pricer.shapes(one.op, one.split)):
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
    return root, layout.axis if layout.kind is Kind.SPLIT else ""


def _bytes(flow: LayerFlow, name: str, layout: Layout) -> int:
    return flow.pricer.memory_bytes(name, layout, flow.degree)
