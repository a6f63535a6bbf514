"""Applies a layer's layouts to its ops, which are the same in all recompute modes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.conversions import ConversionCost
from autopar.planner.costs.ops.case import OpSplit, split_of
from autopar.planner.costs.ops.kept import KeptTensors
from autopar.planner.costs.ops.measurements import OpCost
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import RankParameters, Recompute
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import Op, Parameter, TensorOrigin
from autopar.planner.layers import Layer
from autopar.planner.precision import GRADIENT_BYTES, optimizer_bytes, thin_bytes
from autopar.planner.rules.rule import OpKind, Traffic
from autopar.planner.rules.table import kind_of, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """The weights that a layer shares with other layers of its rank.

    `counted` are counted in an earlier layer that uses them. `waiting` are used by a later layer,
    and by this layer or an earlier one: the later layer's gradient waits in autograd for theirs.
    `tied` are shared with a layer of another rank: the first and the last stage add up gradients.
    """

    counted: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()


UNSHARED = SharedWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters(RankParameters):
    """A rank's parameters of a layer."""

    parameters: int  # elements
    waiting_gradient_bytes: int


def layer_parameters(
    flow: LayerFlow, parameters: Mapping[str, Layout], shared: SharedWeights
) -> LayerParameters:
    """Return the memory of a layer's parameters, without those counted by an earlier layer."""
    pricer, known = flow.pricer, flow.pricer.parameters
    used = dict.fromkeys(name for one in flow.ops for name in one.op.inputs)
    names = [name for name in used if name in known and name not in shared.counted]
    layouts = {name: parameters.get(name, WHOLE) for name in names}
    elements = {name: pricer.elements(name, layouts[name], flow.degree) for name in names}
    learned = [name for name in names if known[name].trainable]
    trainable = sum(elements[name] for name in learned)
    replicated = [name for name in learned if layouts[name].kind is LayoutKind.REPLICATED]
    summed = {*replicated, *shared.tied.intersection(learned)}
    return LayerParameters(
        parameters=sum(elements.values()),
        trainable_tensors=len(learned),
        parameter_bytes=sum(
            pricer.tensor_bytes(name, layouts[name], flow.degree) for name in names
        ),
        gradient_bytes=GRADIENT_BYTES * trainable,
        trainable=trainable,
        optimizer_bytes=sum(
            round(optimizer_bytes(pricer.precision, known[name].moments) * elements[name])
            for name in learned
        ),
        replicated_gradient_bytes=GRADIENT_BYTES * sum(elements[name] for name in replicated),
        whole_gradient_bytes=GRADIENT_BYTES * sum(elements[name] for name in summed),
        thin_gradient_bytes=sum(
            thin_bytes(_rows(known[name], layouts[name], flow.degree), elements[name])
            for name in learned
            if name not in summed
        ),
        float8_weights=tuple(
            (_rows(known[name], layouts[name], flow.degree), elements[name])
            for name in sorted(_in_float8(flow).intersection(elements))
        ),
        waiting_gradient_bytes=_waiting_bytes(flow, parameters, shared.waiting, frozenset(used)),
    )


def _in_float8(flow: LayerFlow) -> frozenset[str]:
    """Return the weights of a layer's products in float8."""
    price = flow.pricer.float8_bytes
    return frozenset(one.op.inputs[1] for one in flow.ops if price(one.op, one.split))


def _rows(parameter: Parameter, layout: Layout, degree: int) -> int:
    """Return the size of a parameter's first dim on a rank."""
    rows = parameter.shape[0].at(1) if parameter.shape else 0
    is_cut = layout.kind is LayoutKind.SPLIT and layout.dim == 0
    return -(-rows // degree) if is_cut else rows


def _waiting_bytes(
    flow: LayerFlow,
    parameters: Mapping[str, Layout],
    waiting: frozenset[str],
    used: frozenset[str],
) -> int:
    """Return the bytes of shared weights' gradients that wait while this layer runs.

    In 16 bits, the layer's own gradient is added to the waiting one in place. In fp32 the sum is a
    new tensor, because a product's gradient is a view.
    """
    known = flow.pricer.parameters
    sizes = {
        name: flow.pricer.elements(name, parameters.get(name, WHOLE), flow.degree)
        for name in waiting
        if known[name].trainable
    }
    added = () if flow.pricer.precision.is_half else used & sizes.keys()
    return GRADIENT_BYTES * (sum(sizes.values()) + sum(sizes[name] for name in added))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """The ops and conversions that are recomputed."""

    ops: tuple[PlacedOp, ...] = ()
    conversions: tuple[LayerConversion, ...] = ()


def recomputed_ops(flow: LayerFlow, mode: Recompute) -> Recomputed:
    """Return what runs again in a mode: nothing, the ops between saved ones, or the forward."""
    if not mode.runs_again:
        return Recomputed()
    return fully_recomputed_ops(flow) if mode.saved_ops is None else _between_saved(flow, mode)


def fully_recomputed_ops(flow: LayerFlow) -> Recomputed:
    """Return what a full recompute runs: PyTorch stops at the last tensor that the backward needs.

    An op saves its operands before it runs. So if the last op that saves anything (such as a
    product) saves only operands, neither it nor anything after it is repeated. Other frameworks run
    a layer to its end, and so does a compiled layer.
    """
    if not flow.pricer.stops_early or flow.ops[0].op.name in flow.pricer.fusion.saved:
        return Recomputed(ops=flow.ops, conversions=flow.conversions)
    keeping = [place for place, one in enumerate(flow.ops) if one.kept.names or one.kept.made]
    if not keeping:
        return Recomputed()
    last = flow.ops[keeping[-1]]
    keeps_result = last.kept.made or any(name in last.op.outputs for name in last.kept.names)
    needed = {
        pair
        for one in flow.ops[: keeping[-1] + 1]
        for pair in zip(one.op.inputs, one.layout.needs, strict=True)
    }
    return Recomputed(
        ops=flow.ops[: keeping[-1] + bool(keeps_result)],
        conversions=_converted(flow, needed),
    )


def _between_saved(flow: LayerFlow, mode: Recompute) -> Recomputed:
    """Return the ops that run again: they lead from what the mode saves to what ops keep."""
    needed: set[tuple[str, Layout]] = set()
    for one in flow.ops:
        needed |= {(name, one.layout_of(name)) for name in one.kept.names}
    names = {name for name, _ in needed}
    again: list[PlacedOp] = []
    for one in reversed(flow.ops):
        is_needed = one.kept.made or names.intersection(one.op.outputs)
        if mode.saves(one.op, flow.pricer.kernels) or not is_needed:
            continue
        again.append(one)
        needed |= set(zip(one.op.inputs, one.layout.needs, strict=True))
        names.update(one.op.inputs)
    return Recomputed(ops=tuple(reversed(again)), conversions=_converted(flow, needed))


def _converted(
    flow: LayerFlow, needed: Collection[tuple[str, Layout]]
) -> tuple[LayerConversion, ...]:
    return tuple(c for c in flow.conversions if (c.tensor, c.needed) in needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """An op in its layout."""

    op: Op
    layout: OpLayout
    split: OpSplit | None
    cost: OpCost
    inside_seconds: float  # collectives inside its forward
    kept: KeptTensors
    launches: tuple[int, int]  # ops that the host dispatches, forward and backward
    is_differentiable: bool

    def layout_of(self, tensor: str) -> Layout:
        """Return the op's layout of one of its operands or results."""
        if tensor in self.op.outputs:
            return self.layout.gives[self.op.outputs.index(tensor)]
        return self.layout.needs[self.op.inputs.index(tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConversion:
    """A tensor that the layer converts once, for all ops that need this layout."""

    tensor: str
    needed: Layout
    cost: ConversionCost


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlow:
    """A layer in its layouts; `produced` is the layout of each tensor before conversions."""

    pricer: OpPricer
    position: int
    ops: tuple[PlacedOp, ...]
    produced: Mapping[str, Layout]
    conversions: tuple[LayerConversion, ...]
    degree: int
    shape: GroupShape  # of the tensor ranks

    def made_here(self, tensor: str) -> bool:
        """Whether an op of this layer makes a tensor."""
        return self.pricer.residence.maker.get(tensor) == self.position

    def takes_over(self, root: str) -> bool:
        """Whether this layer counts the memory of a tensor that an earlier one made.

        It does if it is the only later layer that uses the tensor. An input of the model is counted
        by the first layer that uses it.
        """
        users = self.pricer.later_users.get(root, frozenset())
        origin = self.pricer.graph.tensors[root].origin
        if origin is TensorOrigin.INPUT:
            return min(users, default=-1) == self.position
        return origin is TensorOrigin.OP and users == {self.position}


def layer_flow(
    pricer: OpPricer,
    layer: Layer,
    layouts: Sequence[OpLayout],
    *,
    degree: int,
    shape: GroupShape,
    parameters: Mapping[str, Layout],
    outside: Mapping[str, Layout],
) -> LayerFlow:
    """Return the ops of a layer in their layouts, and the conversions that they need.

    `outside` has the layouts of tensors that pass between layers. The layer that makes such a
    tensor converts it to this layout.
    """
    placed = tuple(
        _placed(pricer, op, layout, degree=degree, shape=shape)
        for op, layout in zip(layer.ops, layouts, strict=True)
    )
    produced: dict[str, Layout] = {}
    for one in placed:
        for name in one.op.inputs:
            produced.setdefault(name, parameters.get(name, outside.get(name, WHOLE)))
        produced.update(zip(one.op.outputs, one.layout.gives, strict=True))
    uses = [pair for one in placed for pair in zip(one.op.inputs, one.layout.needs, strict=True)]
    made = (name for one in placed for name in one.op.outputs)
    handed_on = [(name, outside[name]) for name in made if name in outside]
    conversions = tuple(
        LayerConversion(
            tensor=tensor,
            needed=needed,
            cost=pricer.conversion(tensor, produced[tensor], needed, degree=degree, shape=shape),
        )
        for tensor, needed in dict.fromkeys((*uses, *handed_on))
        if degree > 1 and needed != produced[tensor]
    )
    return LayerFlow(
        pricer=pricer,
        position=pricer.residence.home[layer.ops[0].name],
        ops=placed,
        produced=produced,
        conversions=conversions,
        degree=degree,
        shape=shape,
    )


def _placed(
    pricer: OpPricer, op: Op, layout: OpLayout, *, degree: int, shape: GroupShape
) -> PlacedOp:
    split = split_of(layout, degree)
    return PlacedOp(
        op=op,
        layout=layout,
        split=split,
        cost=pricer.cost(op, split),
        inside_seconds=pricer.inside_seconds(op, split, shape),
        kept=pricer.kept(op),
        launches=pricer.launches(op),
        is_differentiable=pricer.graph.learns(op),
    )


# the name of the tensor that owns the memory; the axis of its split, or ""
MemoryPlace = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """The memory that a layer saves for its backward, and its peak beyond that.

    `learning_bytes` is how far memory rises above the saved bytes while an op with weights runs its
    backward; it is negative if later ops have freed more. `learned_gradient_bytes` is the weight's
    gradient in fp32. Both are of the op that needs most (`_learning` in layer.py). `deferred_bytes`
    are the output gradients of all ops with weights: a split backward holds them, and all saved
    tensors, from its first half to its second. `host_saved_bytes` are on the host meanwhile.
    """

    saved_bytes: int
    transient_bytes: int
    learning_bytes: int
    learned_gradient_bytes: int
    deferred_bytes: int
    host_saved_bytes: int = 0


def learned_elements(flow: LayerFlow, one: PlacedOp) -> list[int]:
    """Return this rank's number of elements of each trained weight of an op."""
    known = flow.pricer.parameters
    return [
        flow.pricer.elements(name, layout, flow.degree)
        for name, layout in zip(one.op.inputs, one.layout.needs, strict=True)
        if name in known and known[name].trainable
    ]


def result_bytes(flow: LayerFlow, one: PlacedOp) -> int:
    """Return the bytes of an op's results."""
    return sum(
        flow.pricer.tensor_bytes(name, one.layout_of(name), flow.degree) for name in one.op.outputs
    )


def working_bytes(flow: LayerFlow, one: PlacedOp) -> int:
    """Return the bytes of an op's results and its inputs' gradients, and more for some ops."""
    if rule_of(one.op.target).traffic is Traffic.NONE:
        return 0
    pricer, tensors = flow.pricer, flow.pricer.graph.tensors
    results = result_bytes(flow, one)
    if not one.is_differentiable:
        return results
    gradients = sum(
        pricer.tensor_bytes(name, layout, flow.degree)
        for name, layout in zip(one.op.inputs, one.layout.needs, strict=True)
        if tensors[name].requires_grad and tensors[name].origin is TensorOrigin.OP
    )
    if kind_of(one.op) is OpKind.CROSS_ENTROPY:
        gradients += _log_probability_bytes(flow, one, gradients)
    return results + gradients + pricer.float8_bytes(one.op, one.split)


def _log_probability_bytes(flow: LayerFlow, one: PlacedOp, logit_bytes: int) -> int:
    """Return a loss's memory in addition to the gradient of its logits.

    If the classes are split (runtime/tensor/vocabulary.py), the gradient of the logits is computed
    in fp32 before it is cast. Otherwise this is the gradient of the log-probabilities, in the dtype
    in which the loss keeps them. If this dtype is wider than that of the logits, their gradient is
    first computed in the wider one.
    """
    logits = one.op.inputs[0]
    layout = one.layout_of(logits)
    if flow.pricer.shapes(one.op, one.split).form is not None:
        return 4 * flow.pricer.elements(logits, layout, flow.degree)
    made = one.kept.own_bytes(one.split) or flow.pricer.tensor_bytes(logits, layout, flow.degree)
    return made + max(0, made - logit_bytes)
